# Penn-Fudan pedestrians in COCO's format, at 384x288 with narrow heads: a run that two CPU cores finish. As
# `wbmm train-det --data data/pennfudan --size 288 --small-heads --epochs 48 --head cascade` would write it, but that it
# starts from a classification run of its own.
_base_ = ["../own/cascade_mask_rcnn.py"]

data_root = "data/pennfudan/"
train_json, train_images = "annotations/train.json", "train/"
val_json, val_images = "annotations/val.json", "val/"
classes = ("pedestrian",)
scale = (384, 288)
width, rois, box_features, mask_convs, proposals = 64, 64, 256, 2, 200
batch_size, workers = 4, 1
max_epochs, milestones, warmup = 48, (32, 44), 100
lr, decay_rate, drop_path_rate = 3e-4, 0.9, 0.1
arch = "wbmm_a"
init = "runs/tiny50/wbmm_a/best.pt"
box_convs = 1
