# Written by tools/write_ablations.py from wbmm/tables/tables.yaml: change it there.
# Feature extraction and window interaction: Full connection
_base_ = ["../../../ade20k/wbmm-t-hier_upernet_8xb2-160k_ade20k-512x512.py"]

model = dict(
    backbone=dict(
        arch="wbmm_t_dense",
        pattern=["WWW", "WWW", "(W)x18", "WWW"],
        mixer="full",
        init_cfg=dict(checkpoint="runs/ablations/imagenet/feature-extraction/full/best.pt"),
    ),
)
