"""The operators: tables, windows, definitions and who computes them; `README.md` beside this file has the maths."""

from .dispatch import BACKENDS, gated_ffn, use_backend, windowed
from .kept import Kept
from .reference import GlobalResponseNorm
from .tables import (
    expand,
    expand_hierarchical,
    expand_table,
    identity_table,
    kernel_to_table,
    num_offsets,
    relative_index,
    resize_table,
    zero_offset,
)
from .windows import PADDING_MODES, merge_windows, pad_to_windows, partition_windows, to_window

__all__ = [
    "BACKENDS",
    "PADDING_MODES",
    "GlobalResponseNorm",
    "Kept",
    "expand",
    "expand_hierarchical",
    "expand_table",
    "gated_ffn",
    "identity_table",
    "kernel_to_table",
    "merge_windows",
    "num_offsets",
    "pad_to_windows",
    "partition_windows",
    "relative_index",
    "resize_table",
    "to_window",
    "use_backend",
    "windowed",
    "zero_offset",
]
