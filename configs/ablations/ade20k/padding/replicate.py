# Written by tools/write_ablations.py from wbmm/tables/tables.yaml: change it there.
# How maps are padded to whole windows: replication
_base_ = ["../../../ade20k/wbmm-t-hier_upernet_8xb2-160k_ade20k-512x512.py"]

model = dict(
    backbone=dict(
        arch="wbmm_t_hier",
        padding_mode="replicate",
    ),
)
