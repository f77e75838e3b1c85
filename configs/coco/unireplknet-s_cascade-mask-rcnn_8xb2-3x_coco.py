_base_ = ["./wbmm-s-dense_cascade-mask-rcnn_8xb2-3x_coco.py"]

# The zoo lists no weights: name a released training checkpoint here, or what
# `wbmm train table:imagenet/unireplknet-s` writes.
weights = "runs/unireplknet_s/best.pt"
model = dict(backbone=dict(arch="unireplknet_s", init_cfg=dict(checkpoint=weights)))
