# Fine-tuning on data of one's own in COCO's format: change `classes` and `data_root`. The classes are the names of the
# categories in the annotation files, in their order; images are in train/ and val/, annotations in annotations/.
# To start from a whole detector rather than from ImageNet: load_from = "detector.pth".
_base_ = ["./wbmm-t-dense_mask-rcnn_8xb2-1x_coco.py"]

classes = ("thing",)
data_root = "data/custom/"

model = dict(
    roi_head=dict(bbox_head=dict(num_classes=len(classes)), mask_head=dict(num_classes=len(classes))),
)
dataset = dict(metainfo=dict(classes=classes), data_root=data_root)
train_dataloader = dict(
    batch_size=4,
    dataset=dict(**dataset, ann_file="annotations/train.json", data_prefix=dict(img="train/")),
)
val_dataloader = dict(dataset=dict(**dataset, ann_file="annotations/val.json", data_prefix=dict(img="val/")))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + "annotations/val.json")
test_evaluator = val_evaluator

optim_wrapper = dict(optimizer=dict(lr=5e-5))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=200),
    dict(type="MultiStepLR", by_epoch=True, begin=0, end=12, milestones=[8, 11], gamma=0.1),
]
