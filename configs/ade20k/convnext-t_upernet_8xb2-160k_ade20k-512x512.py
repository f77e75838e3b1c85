_base_ = ["./_base_/upernet.py", "./_base_/ade20k.py", "./_base_/schedule_160k.py", "./_base_/runtime.py"]

# ConvNeXt's own recipe where it differs from ours: drop path and layer decay.
model = dict(
    backbone=dict(
        type="TimmBackbone",
        arch="convnext_tiny",
        drop_path_rate=0.4,
        init_cfg=dict(type="Pretrained", checkpoint="convnext_tiny.fb_in1k"),
    ),
    decode_head=dict(in_channels=[96, 192, 384, 768]),
    auxiliary_head=dict(in_channels=384),
)
optim_wrapper = dict(paramwise_cfg=dict(decay_rate=0.9, groups=6))
