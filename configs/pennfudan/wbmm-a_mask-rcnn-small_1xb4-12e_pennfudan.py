_base_ = ["../own/_base_/mask_rcnn.py", "./_base_/pennfudan.py"]
