# Written by tools/write_ablations.py from wbmm/tables/tables.yaml: change it there.
# One net, many operators: Win7 Transformer (MLP r = 2.5)
_base_ = ["../../../ade20k/wbmm-t-hier_upernet_8xb2-160k_ade20k-512x512.py"]

model = dict(
    backbone=dict(
        arch="wbmm_t_dense",
        mixer="win_attn",
        init_cfg=dict(checkpoint="runs/ablations/imagenet/cross-operator/win-attn/best.pt"),
    ),
)
