_base_ = [
    "./_base_/cascade_mask_rcnn.py",
    "./_base_/coco_multi_scale.py",
    "./_base_/schedule_3x.py",
    "./_base_/runtime.py",
]

# ConvNeXt's own recipe where it differs from ours: drop path, learning rate and layer decay.
model = dict(
    backbone=dict(
        type="TimmBackbone",
        arch="convnext_tiny",
        drop_path_rate=0.4,
        init_cfg=dict(type="Pretrained", checkpoint="convnext_tiny.fb_in1k"),
    ),
    neck=dict(in_channels=[96, 192, 384, 768]),
)
optim_wrapper = dict(optimizer=dict(lr=2e-4), paramwise_cfg=dict(decay_rate=0.7, groups=6))
