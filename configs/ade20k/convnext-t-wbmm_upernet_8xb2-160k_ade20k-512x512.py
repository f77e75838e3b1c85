_base_ = ["./convnext-t_upernet_8xb2-160k_ade20k-512x512.py"]

# No weights are published: this is what `wbmm train configs/ablations/imagenet/convnext/convnext-t-wbmm.yaml` writes.
weights = "runs/ablations/imagenet/convnext/convnext-t-wbmm/best.pt"
model = dict(backbone=dict(arch="convnext_tiny_wbmm", init_cfg=dict(checkpoint=weights)))
