# Written by tools/write_ablations.py from wbmm/tables/tables.yaml: change it there.
# Windows of each stage: 14+7 14+7 14+7 7
_base_ = ["../../../ade20k/wbmm-t-hier_upernet_8xb2-160k_ade20k-512x512.py"]

model = dict(
    backbone=dict(
        arch="wbmm_t_dense",
        window_size=["14+7", "14+7", "14+7", 7],
        init_cfg=dict(checkpoint="runs/ablations/imagenet/windows/hier-s3/best.pt"),
    ),
)
