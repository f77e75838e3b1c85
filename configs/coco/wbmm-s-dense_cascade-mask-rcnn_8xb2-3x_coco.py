_base_ = ["./wbmm-t-dense_cascade-mask-rcnn_8xb2-3x_coco.py"]

model = dict(
    backbone=dict(arch="wbmm_s_dense", drop_path_rate=0.5, init_cfg=dict(checkpoint="wbmm_s_dense")),
    neck=dict(in_channels=[96, 192, 384, 768]),
)
