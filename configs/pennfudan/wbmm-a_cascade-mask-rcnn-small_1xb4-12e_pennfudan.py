_base_ = ["../own/_base_/cascade_mask_rcnn.py", "./_base_/pennfudan.py"]

box_convs = 1
