# Cascade R-CNN, for annotations with boxes and no masks: Cascade Mask R-CNN without its mask heads.
_base_ = ["./cascade_mask_rcnn.py"]

masks = False
model = dict(roi_head=dict(mask_roi_extractor=None, mask_head=None))
