_base_ = [
    "./_base_/cascade_mask_rcnn.py",
    "./_base_/coco_multi_scale.py",
    "./_base_/schedule_3x.py",
    "./_base_/runtime.py",
]

model = dict(
    backbone=dict(
        arch="wbmm_t_dense",
        drop_path_rate=0.3,
        init_cfg=dict(type="Pretrained", checkpoint="wbmm_t_dense"),
    ),
)
