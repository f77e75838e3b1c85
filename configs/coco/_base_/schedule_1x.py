# 12 epochs of batches of 16, the rate divided by 10 after 8 and 11.
_base_ = ["./schedule_3x.py"]

param_scheduler = [
    dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=500),
    dict(type="MultiStepLR", by_epoch=True, begin=0, end=12, milestones=[8, 11], gamma=0.1),
]
train_cfg = dict(max_epochs=12)
