_base_ = ["./_base_/upernet.py", "./_base_/ade20k.py", "./_base_/schedule_160k.py", "./_base_/runtime.py"]

model = dict(
    backbone=dict(
        arch="wbmm_s_dense",
        drop_path_rate=0.3,
        with_cp=True,
        init_cfg=dict(type="Pretrained", checkpoint="wbmm_s_dense"),
    ),
    decode_head=dict(in_channels=[96, 192, 384, 768]),
    auxiliary_head=dict(in_channels=384),
)
optim_wrapper = dict(paramwise_cfg=dict(decay_rate=0.9, groups=12))
