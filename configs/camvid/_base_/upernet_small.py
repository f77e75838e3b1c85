# CamVid, 11 classes (label 11 is unlabelled), at 320x240 with a narrow UPerNet: a run that one CPU core finishes.
# As `wbmm train-seg --data data/camvid --size 240 --small-heads --iters 300` would write it, with
# smaller crops, narrower heads and another learning rate.
_base_ = ["../../own/upernet.py"]

data_root = "data/camvid"
train_images, train_masks = "images/train", "annotations/train"
val_images, val_masks = "images/val", "annotations/val"
test_images, test_masks = "images/test", "annotations/test"
classes = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
ignore_index = 11
scale, crop = (320, 240), (160, 160)
head_channels, auxiliary_channels = 64, 32
batch_size, workers = 8, 1
max_iters, warmup, val_interval = 300, 30, 100
lr, drop_path_rate = 1e-3, 0.1
tta_ratios = (0.75, 1.0, 1.25)
