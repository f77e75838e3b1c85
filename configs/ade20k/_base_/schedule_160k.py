# 160k iterations of 16 images: AdamW, linear warm-up, then linear to zero; layer decay as the model's file says.
max_iters = 160000
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    constructor="WBMMLayerDecay",
    paramwise_cfg=dict(decay_rate=1.0, groups=9),
    clip_grad=dict(max_norm=35),  # for single bad batches: averages in small runs were below 30
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type="PolyLR", power=1.0, eta_min=0.0, by_epoch=False, begin=1500, end=max_iters),
]
train_cfg = dict(type="IterBasedTrainLoop", max_iters=max_iters, val_interval=16000)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
auto_scale_lr = dict(enable=False, base_batch_size=16)
