"""Silence for exporters, which talk about themselves."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet"]

_NOISY = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the exporter's remarks about itself."""
    loggers = [logging.getLogger(name) for name in _NOISY]
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
