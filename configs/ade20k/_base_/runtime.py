# The runner: imports, hooks, logs. Checkpoints are written whole or not at all; two are kept, and the best.
custom_imports = dict(imports=["wbmm.mm.register"], allow_failed_imports=False)
default_scope = "mmseg"
env_cfg = dict(
    cudnn_benchmark=True,
    mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0),
    dist_cfg=dict(backend="nccl", timeout=1800),
)
default_hooks = dict(
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(
        type="CheckpointHook",
        by_epoch=False,
        interval=4000,
        max_keep_ckpts=2,
        save_best="mIoU",
        backend_args=dict(backend="wbmm.atomic"),
    ),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    visualization=dict(type="SegVisualizationHook"),
)
visualizer = dict(type="SegLocalVisualizer", vis_backends=[dict(type="LocalVisBackend")], name="visualizer")
log_processor = dict(by_epoch=False)
log_level = "INFO"
load_from = None
resume = False
randomness = dict(seed=0)  # fixed, so that a resumed run sees the images in the same order
tta_model = dict(type="SegTTAModel")
