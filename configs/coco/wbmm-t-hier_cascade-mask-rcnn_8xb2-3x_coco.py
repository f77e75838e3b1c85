_base_ = ["./wbmm-t-dense_cascade-mask-rcnn_8xb2-3x_coco.py"]

# No hierarchical weights are published: this is what `wbmm train configs/imagenet/wbmm_t_hier.yaml` writes.
model = dict(backbone=dict(arch="wbmm_t_hier", init_cfg=dict(checkpoint="runs/wbmm_t_hier/best.pt")))
