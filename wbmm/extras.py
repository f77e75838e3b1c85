"""The optional packages: which extra brings each, what to tell a user who lacks one, and how they are kept quiet."""

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

__all__ = [
    "EXPORTERS",
    "PACKAGES",
    "Package",
    "install_command",
    "install_extra",
    "is_installed",
    "need",
    "quiet",
    "silence_telemetry",
]

EXPORTERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")  # whose loggers talk while a model is traced


@dataclass(frozen=True)
class Package:
    """What to look for: the distribution, its import name, and the extra that brings it."""

    distribution: str
    module: str
    extra: str = "core"


PACKAGES = (
    Package("torch", "torch"),
    Package("torchvision", "torchvision"),
    Package("timm", "timm"),
    Package("rich", "rich", "train"),
    Package("tensorboard", "tensorboard", "train"),
    Package("matplotlib", "matplotlib", "train"),
    Package("scikit-learn", "sklearn", "train"),
    Package("webdataset", "webdataset", "train"),
    Package("datasets", "datasets", "train"),
    Package("onnx", "onnx", "export"),
    Package("onnxscript", "onnxscript", "export"),
    Package("onnxruntime", "onnxruntime", "export"),
    Package("openvino", "openvino", "export"),
    Package("nncf", "nncf", "export"),
    Package("wandb", "wandb", "wandb"),
    Package("gradio", "gradio", "app"),
    Package("grad-cam", "pytorch_grad_cam", "analyze"),
    Package("pytest", "pytest", "dev"),
    Package("onedl-mmengine", "mmengine", "seg"),
    Package("onedl-mmcv", "mmcv", "seg"),
    Package("onedl-mmsegmentation", "mmseg", "seg"),
    Package("onedl-mmdetection", "mmdet", "det"),
)


def install_command(module: str | None) -> str | None:
    """What brings an optional package, given its import name or that of a part of it; None for any other module."""
    name = (module or "").partition(".")[0]
    extra = next((package.extra for package in PACKAGES if package.module == name), None)
    return install_extra(extra) if extra and extra != "core" else None


def install_extra(extra: str) -> str:
    """What brings a whole extra."""
    return f"pip install 'wbmm[{extra}]'"


def silence_telemetry() -> None:
    """Keeps OpenVINO and NNCF from reporting their use to their makers, in this process.

    They do so by default from the moment they are imported, through the package `openvino_telemetry`, and take a stub
    where it cannot be imported: so it cannot. Nothing is written to the user's folder, where their own switch is.
    """
    loaded = sys.modules.setdefault("openvino_telemetry", None)
    if loaded is not None:  # OpenVINO was imported by somebody else, and has started to report
        loaded.main.TelemetrySender.send = lambda *_: None


def need(module: str, what: str = "this") -> ModuleType:
    """An optional package, or a part of one, imported; where it is missing, an error says what brings it."""
    silence_telemetry()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        # People know scikit-learn; OpenMMLab's packages they know as they are imported.
        known = {p.module: p.distribution for p in PACKAGES if p.extra not in ("seg", "det")}
        text = f"{what} needs the package {known.get(package, package)}: {install_command(package)}"
        raise ImportError(text, name=package) from error


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Without warnings, and without what loggers of these names say below an error; the root logger is `""`."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def is_installed(package: str) -> bool:
    """Whether a package is there, without the time of importing it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False
