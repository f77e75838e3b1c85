# Cascade Mask R-CNN, as mask_rcnn.py beside it. One dict is the box head of all three stages, so that a file can change
# it: model = dict(roi_head=dict(bbox_head=dict(num_shared_convs=2))).
_base_ = ["../../coco/_base_/cascade_mask_rcnn.py", "../../coco/_base_/runtime.py"]

box_convs = 4
head = dict(in_channels="$width", conv_out_channels="$width", num_classes="$num_classes")
box_head = {
    **_base_.model.roi_head.bbox_head[0],
    **head,
    "num_shared_convs": "$box_convs",
    "fc_out_channels": "$box_features",
}
rcnn = {**_base_.model.train_cfg.rcnn[0]}
rcnn["sampler"] = {**rcnn["sampler"], "num": "$rois"}
model = dict(
    backbone=dict(
        type="$backbone_type", arch="$arch", drop_path_rate="$drop_path_rate", with_cp=False, init_cfg="$init_cfg"
    ),
    neck=dict(in_channels="$channels", out_channels="$width", norm_cfg=_base_.norm_cfg),
    rpn_head=dict(in_channels="$width", feat_channels="$width", anchor_generator=dict(scales=["$anchor_scale"])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels="$width"),
        bbox_head=dict(_delete_=True, **box_head),
        mask_roi_extractor=dict(out_channels="$width"),
        mask_head=dict(num_convs="$mask_convs", norm_cfg=_base_.norm_cfg, **head),
    ),
    train_cfg=dict(rpn_proposal=dict(nms_pre="$proposals", max_per_img="$proposals"), rcnn=dict(_delete_=True, **rcnn)),
    test_cfg=dict(rpn=dict(nms_pre="$proposals", max_per_img="$proposals")),
)
