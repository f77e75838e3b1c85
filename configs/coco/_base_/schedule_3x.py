# 36 epochs of batches of 16, the rate divided by 10 after 27 and 33; AdamW with layer decay.
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    constructor="WBMMLayerDecay",
    paramwise_cfg=dict(decay_rate=0.8, groups=12),
    clip_grad=dict(max_norm=35),  # for single bad batches: averages in small runs were below 30
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=500),
    dict(type="MultiStepLR", by_epoch=True, begin=0, end=36, milestones=[27, 33], gamma=0.1),
]
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=36, val_interval=1)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
auto_scale_lr = dict(enable=False, base_batch_size=16)
