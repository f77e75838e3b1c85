"""The straightforward layout of the family: a reference for parity, and the baseline of speed.

NCHW memory, a permute around each linear, norms from elementary operations, the shortcut added after the product. It
takes weights from the other layers and shares no code with them, so that each can be compared with the other.
"""

from .net import PlainNet, to_plain

__all__ = ["PlainNet", "to_plain"]
