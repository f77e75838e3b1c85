"""Checkpoints of a runner that are there whole or not at all, whenever the process is killed."""

from pathlib import Path

from mmengine.fileio import LocalBackend

from wbmm.deploy.atomic import atomic_path

__all__ = ["ATOMIC", "AtomicBackend"]

ATOMIC = "wbmm.atomic"  # in a configuration: CheckpointHook(backend_args=dict(backend="wbmm.atomic"))


class AtomicBackend(LocalBackend):
    """The local file backend, writing under a temporary name first."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        Path(filepath).parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(filepath, force=True) as temporary:
            temporary.write_bytes(obj)
