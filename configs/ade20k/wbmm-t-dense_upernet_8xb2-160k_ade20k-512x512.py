_base_ = ["./_base_/upernet.py", "./_base_/ade20k.py", "./_base_/schedule_160k.py", "./_base_/runtime.py"]

model = dict(
    backbone=dict(
        arch="wbmm_t_dense",
        drop_path_rate=0.2,
        init_cfg=dict(type="Pretrained", checkpoint="wbmm_t_dense"),
    ),
)
