# Cascade Mask R-CNN on data of your own in COCO's format: as mask_rcnn.py beside it.
_base_ = ["./_base_/cascade_mask_rcnn.py", "./_base_/coco_format.py"]
