_base_ = ["./convnext-t_cascade-mask-rcnn_8xb2-3x_coco.py"]

# No weights are published: this is what `wbmm train table:convnext/convnext-t-wbmm` writes.
weights = "runs/convnext_tiny_wbmm/best.pt"
model = dict(backbone=dict(arch="convnext_tiny_wbmm", init_cfg=dict(checkpoint=weights)))
