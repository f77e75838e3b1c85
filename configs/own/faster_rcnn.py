# Faster R-CNN, for annotations with boxes and no masks: Mask R-CNN without its mask head.
_base_ = ["./mask_rcnn.py"]

masks = False
model = dict(type="FasterRCNN", roi_head=dict(mask_roi_extractor=None, mask_head=None))
