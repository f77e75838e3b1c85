"""The packages of the extra `export`: imported when they are needed, and kept quiet while they work."""

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from wbmm.extras import install_command
from wbmm.machine import silence_telemetry

__all__ = ["EXPORTERS", "need", "quiet"]

EXPORTERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")


def need(package: str) -> ModuleType:
    """A package of the extra `export`, or an error that names it."""
    silence_telemetry()
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(f"this needs the package {package}: {install_command(package)}") from None


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
