"""What a field of the configuration takes: its range, its names or its kind of text, declared beside its default.

`is_number`, `is_text` and `is_whole` say whether a value that came from a file is of a kind, finite and within bounds.
"""

import difflib
import math
import re
import reprlib
import sys
import unicodedata
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Choice", "Items", "Known", "Plain", "Range", "Text", "is_number", "is_text", "is_whole", "show", "takes"]


class _Short(reprlib.Repr):
    """Values of any size in one short line."""

    def __init__(self):
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 80, 80

    def repr_int(self, value, level):
        bits = value.bit_length()
        return repr(value) if bits < 200 else f"a whole number of {int(bits * math.log10(2)) + 1} digits"


show = _Short().repr


@dataclass(frozen=True)
class Range:
    """A number from `low` to `high`; in `ends`, `[` and `]` include the end, `(` and `)` do not."""

    low: float
    high: float
    ends: str = "[]"

    def problem(self, value: float) -> str | None:
        above = value > self.low if self.ends[0] == "(" else value >= self.low
        below = value < self.high if self.ends[1] == ")" else value <= self.high
        return None if above and below else f"must be {self}, got {show(value)}"

    def __str__(self) -> str:
        if self.ends == "[]":
            return f"from {_number(self.low)} to {_number(self.high)}"
        low = f"above {_number(self.low)}" if self.ends[0] == "(" else f"at least {_number(self.low)}"
        high = f"below {_number(self.high)}" if self.ends[1] == ")" else f"at most {_number(self.high)}"
        return f"{low} and {high}"


class Choice:
    """One of a few values."""

    def __init__(self, *values):
        self.values = values

    def problem(self, value) -> str | None:
        return None if value in self.values else f"is {show(value)}; valid: {', '.join(map(str, self.values))}"


@dataclass(frozen=True)
class Known:
    """A name from a long list, of which the error names the nearest."""

    what: str
    names: Callable[[], Sequence[str]]
    knows: Callable[[str], bool]

    def problem(self, value: str) -> str | None:
        if value and self.knows(value):
            return None
        near = difflib.get_close_matches(value[:100], self.names(), n=3)
        hint = f"; near it: {', '.join(near)}" if near else f", e.g. {self.names()[0]}"
        return f"{show(value)} is not {self.what}{hint}"


@dataclass(frozen=True)
class Text:
    """Text of one line.

    Attributes:
        most: its length.
        pattern: a regular expression that matches the whole of it.
        valid: the pattern in words.
    """

    most: int = 255
    pattern: str | None = None
    valid: str = ""

    def problem(self, value: str) -> str | None:
        if not value.strip():
            return f"must not be empty, got {show(value)}"
        if len(value) > self.most:
            return f"is {len(value)} characters long ({show(value)}); at most {self.most} are allowed"
        if any(unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") for sign in value):
            return f"must not hold control characters, got {show(value)}"
        if self.pattern and not re.fullmatch(self.pattern, value):
            return f"is {show(value)}; valid: {self.valid}"
        return None


@dataclass(frozen=True)
class Items:
    """A list of `least` to `most` items, each with a rule of its own."""

    least: int
    most: int
    each: Any

    def problem(self, value: list) -> str | None:
        if not self.least <= len(value) <= self.most:
            count = self.least if self.least == self.most else f"{self.least} to {self.most}"
            return f"must hold {count} items, got {len(value)}: {show(value)}"
        wrong = next((text for text in map(self.each.problem, value) if text), None)
        return wrong and f"{show(value)}: an item {wrong}"


@dataclass(frozen=True)
class Plain:
    """A mapping of names to plain values: numbers, text, true and false, lists and mappings of them."""

    deepest: int = 4
    most: int = 1000
    number: Range = Range(-1e9, 1e9)

    def problem(self, value: dict) -> str | None:
        left = [self.most]
        return self._inside(value, self.deepest, left)

    def _inside(self, value, depth: int, left: list[int]) -> str | None:
        left[0] -= 1
        if depth < 0 or left[0] < 0:
            return f"is nested deeper than {self.deepest} or holds more than {self.most} values: {show(value)}"
        if value is None or isinstance(value, bool):
            return None
        if isinstance(value, int | float):
            return self.number.problem(value)
        if isinstance(value, str):
            return Text(4096).problem(value) if value else None
        if isinstance(value, dict):
            wrong = next((key for key in value if not (isinstance(key, str) and re.fullmatch(r"\w{1,64}", key))), None)
            if wrong is not None or None in value:
                return f"has a key that is not a name: {show(wrong)}"
        elif not isinstance(value, list | tuple):
            return f"holds {show(value)}; valid: numbers, text, true, false, null, lists and mappings"
        for item in value.values() if isinstance(value, dict) else value:
            if found := self._inside(item, depth - 1, left):
                return found
        return None


def takes(default, rule):
    """A field with a default and a rule; one of type `... | None` takes null as well."""
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata={"rule": rule})
    return field(default=default, metadata={"rule": rule})


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_text(value: object, longest: int = 200) -> bool:
    return isinstance(value, str) and 0 < len(value) <= longest
