# Fine-tuning on a data set of one's own: change `classes`, `num_classes` and `data_root`. Pictures and label maps have
# the same names in img_dir/{train,val} and ann_dir/{train,val}; label i is classes[i], and 255 is ignored.
# To start from a whole segmentor rather than from ImageNet: load_from = "upernet_wbmm_t_ade20k_w7.pth".
_base_ = ["./wbmm-t-dense_upernet_8xb2-160k_ade20k-512x512.py"]

classes = ("background", "object")
num_classes = len(classes)
data_root = "data/custom"
max_iters = 20000

model = dict(decode_head=dict(num_classes=num_classes), auxiliary_head=dict(num_classes=num_classes))
dataset = dict(
    type="BaseSegDataset",
    metainfo=dict(classes=classes),
    img_suffix=".jpg",
    seg_map_suffix=".png",
    reduce_zero_label=False,
    data_root=data_root,
)
train_dataloader = dict(
    batch_size=8,
    dataset=dict(**dataset, data_prefix=dict(img_path="img_dir/train", seg_map_path="ann_dir/train")),
)
val_dataloader = dict(
    dataset=dict(**dataset, data_prefix=dict(img_path="img_dir/val", seg_map_path="ann_dir/val")),
)
test_dataloader = val_dataloader

optim_wrapper = dict(optimizer=dict(lr=5e-5))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6, by_epoch=False, begin=0, end=500),
    dict(type="PolyLR", power=1.0, eta_min=0.0, by_epoch=False, begin=500, end=max_iters),
]
train_cfg = dict(max_iters=max_iters, val_interval=1000)
default_hooks = dict(checkpoint=dict(interval=1000))
