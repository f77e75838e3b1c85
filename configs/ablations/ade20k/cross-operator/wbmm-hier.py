# Written by tools/write_ablations.py from wbmm/tables/tables.yaml: change it there.
# One net, many operators: WBMM-T (w = 14, Hier)
_base_ = ["../../../ade20k/wbmm-t-hier_upernet_8xb2-160k_ade20k-512x512.py"]

model = dict(
    backbone=dict(
        arch="wbmm_t_dense",
        mixer="wbmm_hier",
        init_cfg=dict(checkpoint="runs/ablations/imagenet/cross-operator/wbmm-hier/best.pt"),
    ),
)
