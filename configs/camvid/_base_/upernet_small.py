# CamVid, 11 classes (label 11 is unlabelled), at 320x240 with a narrow UPerNet: a run that two CPU cores finish.
# As `wbmm train-seg --data data/camvid --size 240 --small-heads --iters 3000` would write it.
_base_ = ["../../own/upernet.py"]

data_root = "data/camvid"
train_images, train_masks = "images/train", "annotations/train"
val_images, val_masks = "images/val", "annotations/val"
test_images, test_masks = "images/test", "annotations/test"
classes = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
ignore_index = 11
scale, crop = (320, 240), (224, 224)
head_channels, auxiliary_channels = 128, 64
batch_size, workers = 8, 1
max_iters, warmup, val_interval = 3000, 150, 500
lr, drop_path_rate = 3e-4, 0.1
