# Data of your own in COCO's format, and a short schedule; the variables are those of the files beside this folder.
arch = "wbmm_t_dense"  # of the zoo, or a name that timm knows
init, resize_tables = None, False  # a file of weights, or None: from scratch; interpolate tables of other windows
drop_path_rate = 0.1
classes = ("thing",)  # names of the categories, in the file's order
data_root = "data/custom/"
train_json, train_images = "annotations/train.json", "train/"
val_json, val_images = "annotations/val.json", "val/"
masks = True  # False for boxes alone; `metrics` follows from it
scale = (1333, 800)  # pictures are scaled into it, with their aspect ratio kept; in training by 0.75 to 1.25 more
batch_size, workers = 4, 4
max_epochs, milestones, warmup, val_interval = 12, (8, 11), 200, 1
lr, decay_rate = 1e-4, 0.8
# Of the heads: channels of FPN and heads, RoIs an image, features of the box head, convolutions of the mask head.
width, rois, box_features, mask_convs = 256, 512, 1024, 4
anchor_scale = 8  # of the smallest anchor, in strides of its map
proposals = 1000

train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True, with_mask="$masks"),
    dict(type="RandomResize", scale="$scale", ratio_range=(0.75, 1.25), keep_ratio=True),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale="$scale", keep_ratio=True),
    dict(type="LoadAnnotations", with_bbox=True, with_mask="$masks"),  # after Resize: they keep the image's size
    dict(type="PackDetInputs", meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")),
]
train_dataloader = dict(
    batch_size="$batch_size",
    num_workers="$workers",
    persistent_workers="$persistent_workers",
    sampler=dict(type="DefaultSampler", shuffle=True),
    batch_sampler=dict(type="AspectRatioBatchSampler"),
    dataset=dict(
        type="CocoDataset",
        metainfo=dict(classes="$classes", palette="$palette"),
        data_root="$data_root",
        ann_file="$train_json",
        data_prefix=dict(img="$train_images"),
        filter_cfg=dict(filter_empty_gt=True, min_size=8),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers="$workers",
    persistent_workers="$persistent_workers",
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type="CocoDataset",
        metainfo=dict(classes="$classes", palette="$palette"),
        data_root="$data_root",
        ann_file="$val_json",
        data_prefix=dict(img="$val_images"),
        test_mode=True,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="CocoMetric", ann_file="$val_json_path", metric="$metrics")
test_evaluator = val_evaluator

optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr="$lr", betas=(0.9, 0.999), weight_decay=0.05),
    constructor="WBMMLayerDecay",
    paramwise_cfg=dict(decay_rate="$decay_rate"),  # the groups follow from the backbone's depths
    clip_grad=dict(max_norm=35),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end="$warmup"),
    dict(type="MultiStepLR", by_epoch=True, begin=0, end="$max_epochs", milestones="$milestones", gamma=0.1),
]
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs="$max_epochs", val_interval="$val_interval")
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
