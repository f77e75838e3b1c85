"""WBMM in MMSegmentation and MMDetection: the backbone, layer decay, and training and testing with mmengine.

Modules are of two kinds. Those that need mmengine import it at the top: `register` (which `custom_imports` of a
configuration names), `build`, `loading`, `check_data` and `runner`. All others work without it, and with them
`wbmm reparam`, `wbmm segment` on an exported file, every `--help` and the message about a missing package. They import
a module of the first kind only inside a function, after `require`.
"""

import contextlib
import importlib
import io
import warnings

from wbmm.extras import install_extra

__all__ = ["MMCV_HELP", "check_mmcv_ops", "require"]

MMCV_HELP = (
    "its operators are built from source, against the torch that is installed and with a C++ compiler: "
    "pip install ninja 'setuptools<82' wheel, then "
    "pip install --no-build-isolation --force-reinstall --no-deps onedl-mmcv (docs/install.md)"
)
_MODULES = {"seg": ("mmengine", "mmcv", "mmseg"), "det": ("mmengine", "mmcv", "mmdet")}
_NOISY = {"seg": ("mmseg.datasets",), "det": ("mmdet.datasets", "mmdet.evaluation")}
_TASKS = {"seg": "segmentation", "det": "detection"}


def require(extra: str) -> None:
    """Raises an `ImportError` that says what to install, unless the packages of an extra (`seg` or `det`) are there."""
    for name in _MODULES[extra]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            advice = install_extra(extra)
            advice = f"{MMCV_HELP}, then {advice}" if name == "mmcv" else advice
            raise ImportError(f"{_TASKS[extra]} needs {name}, which cannot be imported ({error}): {advice}") from None
    if extra == "det":
        usable, detail = check_mmcv_ops()
        if not usable:
            raise ImportError(f"detection needs mmcv's operators: {detail}")
    for name in _NOISY[extra]:
        _import_quietly(name)


def _import_quietly(name: str) -> None:
    """Imports a module that tells of optional packages (OneDL, faster-coco-eval) on the way; the rest is shown."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "faster_coco_eval is not installed")
        importlib.import_module(name)
    lines = [line for line in said.getvalue().splitlines() if "OneDL" not in line]
    print(*lines, sep="\n", end="\n" if lines else "")


def check_mmcv_ops() -> tuple[bool, str]:
    """Whether mmcv has its compiled operators, and what to do if not."""
    try:
        importlib.import_module("mmcv")
    except Exception:  # a broken install can fail with anything
        return False, f"mmcv is not installed; {MMCV_HELP}"
    try:
        importlib.import_module("mmcv.ops")
    except Exception:
        return False, f"mmcv was built without its operators; detection needs them: {MMCV_HELP}"
    return True, "nms, roi_align and the others are there"
