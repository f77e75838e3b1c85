# UPerNet on data of your own. `wbmm train-seg --data DIR` writes a file that starts from this one. By hand:
#     _base_ = "wbmm::own/upernet.py"
#     arch, classes, data_root, crop, scale = "wbmm_t_dense", ("road", "car"), "/data/streets", (512, 512), (2048, 512)
# A value "$name" is the variable `name` as the last file or --cfg-options sets it; `channels`, `num_classes` and
# `palette` follow from `arch` and `classes`.
_base_ = ["../ade20k/_base_/upernet.py", "../ade20k/_base_/runtime.py"]

arch = "wbmm_t_dense"  # of the zoo, or a name that timm knows
init, resize_tables = None, False  # a file of weights, or None: from scratch; interpolate tables of other windows
drop_path_rate = 0.1
head_channels, auxiliary_channels = 512, 256
classes = ("background", "object")
ignore_index = 255  # label of pixels that do not count
reduce_zero_label = False  # True: label 0 does not count, and class i has the label i + 1
data_root = "data/custom"
train_images, train_masks, train_list = "images/train", "masks/train", ""  # "": every image of the folder
val_images, val_masks, val_list = "images/val", "masks/val", ""
test_images, test_masks, test_list = "$val_images", "$val_masks", "$val_list"  # of tools/test_seg.py
img_suffix, mask_suffix = ".jpg", ".png"
crop = (512, 512)  # height and width of what is trained on
scale = (2048, 512)  # pictures are scaled into it, with their aspect ratio kept; in training by 0.5 to 2 more
tta_ratios = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
batch_size, workers = 8, 4
max_iters, warmup, val_interval = 20000, 500, 1000
lr, decay_rate = 1e-4, 1.0

model = dict(
    data_preprocessor=dict(size="$crop"),
    backbone=dict(type="$backbone_type", arch="$arch", drop_path_rate="$drop_path_rate", init_cfg="$init_cfg"),
    decode_head=dict(in_channels="$channels", channels="$head_channels", num_classes="$num_classes"),
    auxiliary_head=dict(in_channels="$channels.2", channels="$auxiliary_channels", num_classes="$num_classes"),
)
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations"),
    dict(type="RandomResize", scale="$scale", ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type="RandomCrop", crop_size="$crop", cat_max_ratio=0.75),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PhotoMetricDistortion"),
    dict(type="PackSegInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale="$scale", keep_ratio=True),
    dict(type="LoadAnnotations"),  # after Resize: labels keep their size
    dict(type="PackSegInputs"),
]
dataset = dict(
    type="BaseSegDataset",
    metainfo=dict(classes="$classes", palette="$palette"),
    data_root="$data_root",
    img_suffix="$img_suffix",
    seg_map_suffix="$mask_suffix",
    reduce_zero_label="$reduce_zero_label",
    ignore_index="$ignore_index",
)
train_dataloader = dict(
    batch_size="$batch_size",
    num_workers="$workers",
    persistent_workers="$persistent_workers",
    sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(
        **dataset,
        ann_file="$train_list",
        data_prefix=dict(img_path="$train_images", seg_map_path="$train_masks"),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers="$workers",
    persistent_workers="$persistent_workers",
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        **dataset,
        ann_file="$val_list",
        data_prefix=dict(img_path="$val_images", seg_map_path="$val_masks"),
        pipeline=test_pipeline,
    ),
)
test_dataset = dict(
    **dataset,
    ann_file="$test_list",
    data_prefix=dict(img_path="$test_images", seg_map_path="$test_masks"),
    pipeline=test_pipeline,
)
test_dataloader = {**val_dataloader, "dataset": test_dataset}
val_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])
test_evaluator = val_evaluator

optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr="$lr", betas=(0.9, 0.999), weight_decay=0.05),
    constructor="WBMMLayerDecay",
    paramwise_cfg=dict(decay_rate="$decay_rate"),  # the groups follow from the backbone's depths
    clip_grad=dict(max_norm=35),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6, by_epoch=False, begin=0, end="$warmup"),
    dict(type="PolyLR", power=1.0, eta_min=0.0, by_epoch=False, begin="$warmup", end="$max_iters"),
]
train_cfg = dict(type="IterBasedTrainLoop", max_iters="$max_iters", val_interval="$val_interval")
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
default_hooks = dict(checkpoint=dict(interval="$val_interval"))
