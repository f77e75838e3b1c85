_base_ = ["./wbmm-t-dense_upernet_8xb2-160k_ade20k-512x512.py"]

# The zoo lists no weights: name a released training checkpoint here, or what
# `wbmm train table:imagenet/unireplknet-t` writes.
weights = "runs/unireplknet_t/best.pt"
model = dict(backbone=dict(arch="unireplknet_t", init_cfg=dict(checkpoint=weights)))
