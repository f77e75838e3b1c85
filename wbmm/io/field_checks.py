"""Whether a value that came from a file is what a field may hold: of the right type, finite and within bounds."""

import sys

__all__ = ["is_number", "is_text", "is_whole"]


def is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_text(value: object, longest: int = 200) -> bool:
    return isinstance(value, str) and 0 < len(value) <= longest
