_base_ = ["./wbmm-t-dense_upernet_8xb2-160k_ade20k-512x512.py"]

# No hierarchical weights are published: this is what `wbmm train configs/imagenet/wbmm_t_hier.yaml` writes.
model = dict(backbone=dict(arch="wbmm_t_hier", init_cfg=dict(checkpoint="runs/wbmm_t_hier/best.pt")))
