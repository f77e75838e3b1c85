# A cheaper entry, which the paper does not have: Mask R-CNN for 12 epochs at one scale.
_base_ = ["./_base_/mask_rcnn.py", "./_base_/coco.py", "./_base_/schedule_1x.py", "./_base_/runtime.py"]

model = dict(
    backbone=dict(
        arch="wbmm_t_dense",
        drop_path_rate=0.2,
        init_cfg=dict(type="Pretrained", checkpoint="wbmm_t_dense"),
    ),
)
