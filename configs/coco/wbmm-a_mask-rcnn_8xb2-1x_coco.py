# The smallest. No weights are published: this is what `wbmm train configs/imagenet/wbmm_a.yaml` writes.
_base_ = ["./wbmm-t-dense_mask-rcnn_8xb2-1x_coco.py"]

model = dict(
    backbone=dict(arch="wbmm_a", drop_path_rate=0.0, with_cp=False, init_cfg=dict(checkpoint="runs/wbmm_a/best.pt")),
    neck=dict(in_channels=[40, 80, 160, 320]),
)
optim_wrapper = dict(paramwise_cfg=dict(groups=5))
