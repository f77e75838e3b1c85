"""Packaging: version ranges here, the exact tested versions in requirements.txt."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent

EXTRAS = {
    "train": [
        "rich>=13",
        "tensorboard>=2.16",
        "matplotlib>=3.8",
        "scikit-learn>=1.3",
        "webdataset>=0.2",
        "datasets>=3",
    ],
    "seg": ["onedl-mmengine>=0.10.12,<0.11", "onedl-mmcv>=2.3.6,<2.4", "onedl-mmsegmentation>=1.4.2,<1.5", "ftfy"],
    "det": ["onedl-mmengine>=0.10.12,<0.11", "onedl-mmcv>=2.3.6,<2.4", "onedl-mmdetection>=3.5.1,<3.6"],
    "export": ["onnx>=1.17", "onnxscript>=0.5", "onnxruntime>=1.20", "openvino>=2025.0", "nncf>=2.14"],
    "wandb": ["wandb>=0.19"],
    "app": ["gradio>=6"],
    "analyze": ["grad-cam>=1.5.5", "matplotlib>=3.8"],
    "docs": ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.30"],
    "dev": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "ruff>=0.9",
        "build>=1.2",
        "twine>=6",
        "import-linter>=2",
        "mypy>=1.15",
        "playwright>=1.50",
        "sybil>=9",
        "nbclient>=0.10",
        "ipykernel>=6.29",
        "jsonschema>=4.20",
        "segmentation-models-pytorch>=0.5",
    ],
}
EXTRAS["all"] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})


class BuildWithFolders(build_py):
    """The wheel carries configs/ and the weights of models/ inside of wbmm/; a checkout reads them where they are."""

    FOLDERS = (("configs", "configs", "__pycache__"), ("models", "weights", "*.md"))  # from, to, left out

    def run(self):
        super().run()
        if self.editable_mode:
            return
        for source, name, left_out in self.FOLDERS:
            target = Path(self.build_lib, "wbmm", name)
            shutil.rmtree(target, ignore_errors=True)  # of an earlier build
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns(left_out))


setup(
    name="wbmm",
    version=(ROOT / "wbmm" / "version.py").read_text().split('"')[1],
    description="Windowed batch matrix multiplication: a vision backbone family, its model zoo and training framework",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["wbmm", "wbmm.*"]),
    package_data={"wbmm": ["*.yaml", "bench/*.csv", "py.typed"]},
    cmdclass={"build_py": BuildWithFolders},
    install_requires=["torch>=2.9,<2.13", "torchvision>=0.24,<0.28", "timm>=1.0.30,<1.1"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["wbmm=wbmm.cli:main"]},
)
