_base_ = ["./wbmm-s-dense_cascade-mask-rcnn_8xb2-3x_coco.py"]

# No hierarchical weights are published: this is what `wbmm train configs/imagenet/wbmm_s_hier.yaml` writes.
model = dict(backbone=dict(arch="wbmm_s_hier", init_cfg=dict(checkpoint="runs/wbmm_s_hier/best.pt")))
