"""What changes in a configuration on a machine without CUDA: batch norms, the process group, the model's wrapper."""

import os
from datetime import timedelta

import torch
import torch.distributed as td
from mmengine.config import Config

__all__ = ["prepare_device", "without_sync_bn"]

_SYNC_BN = ("SyncBN", "MMSyncBN", "NaiveSyncBN")


def without_sync_bn(config: object) -> object:
    """Replaces SyncBN by BN in a configuration, in place; the names of the weights are the same."""
    if isinstance(config, dict):
        if config.get("type") in _SYNC_BN:
            config["type"] = "BN"
        for value in config.values():
            without_sync_bn(value)
    elif isinstance(config, list | tuple):
        for value in config:
            without_sync_bn(value)
    return config


def prepare_device(cfg: Config) -> str | None:
    """On a CPU: ordinary batch norms, gloo, and no device ids. Returns what was changed, None with CUDA.

    The process group is opened here, since mmengine would ask CUDA for a device first.
    """
    if torch.cuda.is_available():
        return None
    without_sync_bn(cfg.model)
    text = "no CUDA device: SyncBN becomes BN"
    launcher = cfg.get("launcher", "none")
    if launcher == "none":
        return text
    if launcher != "pytorch":
        raise ValueError(f"launcher {launcher!r} needs CUDA devices; on CPUs start the processes with torchrun")
    cfg.model_wrapper_cfg = {"type": "MMDistributedDataParallel", "device_ids": None, "broadcast_buffers": False}
    cfg.custom_hooks = [*cfg.get("custom_hooks", []), {"type": "BroadcastBuffersHook"}]
    if not td.is_initialized():
        seconds = cfg.get("env_cfg", {}).get("dist_cfg", {}).get("timeout", 1800)
        td.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    return f"{text}, gloo between the {os.environ['WORLD_SIZE']} processes"
