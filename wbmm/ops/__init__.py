"""The WBMM operator as small pure functions; `README.md` beside this file has the maths."""

from .cache import MatrixCache
from .product import windowed_product
from .tables import (
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
    "PADDING_MODES",
    "MatrixCache",
    "expand_hierarchical",
    "expand_table",
    "identity_table",
    "kernel_to_table",
    "merge_windows",
    "num_offsets",
    "pad_to_windows",
    "partition_windows",
    "relative_index",
    "resize_table",
    "to_window",
    "windowed_product",
    "zero_offset",
]
