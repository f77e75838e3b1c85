# Mask R-CNN whose sizes are variables: "$name" is what the last file or --cfg-options sets `name` to.
_base_ = ["../../coco/_base_/mask_rcnn.py", "../../coco/_base_/runtime.py"]

norm_cfg = dict(type="SyncBN", requires_grad=True)
head = dict(in_channels="$width", num_classes="$num_classes")
model = dict(
    backbone=dict(
        type="$backbone_type", arch="$arch", drop_path_rate="$drop_path_rate", with_cp=False, init_cfg="$init_cfg"
    ),
    neck=dict(in_channels="$channels", out_channels="$width", norm_cfg=norm_cfg),
    rpn_head=dict(in_channels="$width", feat_channels="$width", anchor_generator=dict(scales=["$anchor_scale"])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels="$width"),
        bbox_head=dict(fc_out_channels="$box_features", **head),
        mask_roi_extractor=dict(out_channels="$width"),
        mask_head=dict(num_convs="$mask_convs", conv_out_channels="$width", norm_cfg=norm_cfg, **head),
    ),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre="$proposals", max_per_img="$proposals"), rcnn=dict(sampler=dict(num="$rois"))
    ),
    test_cfg=dict(rpn=dict(nms_pre="$proposals", max_per_img="$proposals")),
)
