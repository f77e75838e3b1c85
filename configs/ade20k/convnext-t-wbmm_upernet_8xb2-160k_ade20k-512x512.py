_base_ = ["./convnext-t_upernet_8xb2-160k_ade20k-512x512.py"]

# No weights are published: this is what `wbmm train table:convnext/convnext-t-wbmm` writes.
weights = "runs/convnext_tiny_wbmm/best.pt"
model = dict(backbone=dict(arch="convnext_tiny_wbmm", init_cfg=dict(checkpoint=weights)))
