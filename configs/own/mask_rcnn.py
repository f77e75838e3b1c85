# Mask R-CNN on data of your own in COCO's format. `wbmm train-det --data DIR` writes a file that starts from this one.
# A value "$name" is the variable `name` as the last file or --cfg-options sets it; `channels`, `num_classes` and
# `palette` follow from `arch` and `classes`. The variables are in _base_/coco_format.py.
_base_ = ["./_base_/mask_rcnn.py", "./_base_/coco_format.py"]
