# Penn-Fudan pedestrians in COCO's format, at 320x240 with narrow heads: a run that one CPU core finishes. As
# `wbmm train-det --data data/pennfudan --model wbmm_a --init wbmm_a.tiny50 --size 240 --small-heads` would write it,
# with another learning rate. The weights come with the project.
_base_ = ["../../own/_base_/coco_format.py"]

data_root = "data/pennfudan/"
classes = ("pedestrian",)
scale = (320, 240)
width, rois, box_features, mask_convs, proposals = 64, 64, 256, 2, 200
batch_size, workers = 4, 1
max_epochs, milestones, warmup, val_interval = 12, (8, 11), 60, 4
lr, decay_rate, drop_path_rate = 8e-4, 0.9, 0.1
arch = "wbmm_a"
init = "wbmm_a.tiny50"
