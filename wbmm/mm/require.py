"""What segmentation and detection need installed, and what to do when it is not."""

import importlib

from wbmm.commands.doctor import MMCV_HELP, check_mmcv_ops

__all__ = ["require"]

_MODULES = {"seg": ("mmengine", "mmcv", "mmseg"), "det": ("mmengine", "mmcv", "mmdet")}
_TASKS = {"seg": "segmentation", "det": "detection"}


def require(extra: str) -> None:
    """Raises an `ImportError` that says what to install, unless the packages of an extra (`seg` or `det`) are there."""
    for name in _MODULES[extra]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            advice = MMCV_HELP if name == "mmcv" else f"in the checkout, pip install '.[{extra}]'"
            raise ImportError(f"{_TASKS[extra]} needs {name}, which cannot be imported ({error}): {advice}") from None
    if extra == "det":
        usable, detail = check_mmcv_ops()
        if not usable:
            raise ImportError(f"detection needs mmcv's operators: {detail}")
