_base_ = ["./wbmm-t-dense_cascade-mask-rcnn_8xb2-3x_coco.py"]

# The zoo lists no weights: name a released training checkpoint here, or what
# `wbmm train table:imagenet/unireplknet-t` writes.
weights = "runs/unireplknet_t/best.pt"
model = dict(backbone=dict(arch="unireplknet_t", init_cfg=dict(checkpoint=weights)))
