# Written by tools/write_ablations.py from wbmm/tables/tables.yaml: change it there.
# Which blocks are WBMM (W) and which 3x3 depthwise (D): WWW WWW (W)x18 WWW
_base_ = ["../../../ade20k/wbmm-t-hier_upernet_8xb2-160k_ade20k-512x512.py"]

model = dict(
    backbone=dict(
        arch="wbmm_t",
        pattern=["WWW", "WWW", "(W)x18", "WWW"],
        init_cfg=dict(checkpoint="runs/ablations/imagenet/patterns/www-www-ww-www/best.pt"),
    ),
)
