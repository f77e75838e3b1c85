"""The optional packages: which extra brings each, and what to tell a user who lacks one."""

from dataclasses import dataclass

__all__ = ["PACKAGES", "Package", "install_command"]


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
    return f"pip install 'wbmm[{extra}]'" if extra and extra != "core" else None
