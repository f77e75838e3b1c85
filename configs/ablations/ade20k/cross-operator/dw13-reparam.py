# Written by tools/write_ablations.py from wbmm/tables/tables.yaml: change it there.
# One net, many operators: 13x13 DW + reparam (no LKA)
_base_ = ["../../../ade20k/wbmm-t-hier_upernet_8xb2-160k_ade20k-512x512.py"]

model = dict(
    backbone=dict(
        arch="wbmm_t_dense",
        mixer="dw13_reparam",
        init_cfg=dict(checkpoint="runs/ablations/imagenet/cross-operator/dw13-reparam/best.pt"),
    ),
)
