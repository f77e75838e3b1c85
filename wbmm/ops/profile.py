"""The thresholds by which a CPU backend chooses a path, and the file that replaces them on another processor.

`wbmm bench paths --tune` measures and writes such a file. It is read from the path in the environment variable
WBMM_PROFILE, else from `default_place()` if it was measured on this processor. Without a file the defaults below hold.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

import torch

from wbmm.machine import processor

__all__ = ["Profile", "Thresholds", "current", "default_place", "load", "parse", "thresholds", "to_text", "use_profile"]

log = logging.getLogger(__name__)

VARIABLE = "WBMM_PROFILE"
NEVER = 2**31  # as a threshold: the path is never taken
_MOST_BYTES = 2**16  # of a file


def _bounded(default: int, least: int, most: int) -> int:
    return field(default=default, metadata={"bounds": (least, most)})


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From where on a path is taken, in one data type.

    Attributes:
        least_side: windows of at least this side are convolved; smaller ones are multiplied with their matrix.
        least_width: kernels of convolved windows are at least this wide (odd), filled up with columns of zeros.
        block_bytes: the hidden layer of a feed-forward part is computed in blocks of about this size,
        block_rows: but of no fewer rows than this in inference
        backward_rows: and no fewer than this in training.
        matrix_bytes: the matrix's gradient is computed for as many channels at a time as fit into this.
        ffn_training_rows: feed-forward parts of at least so many rows (batch x height x width) train with the
            written-out backward pass, smaller ones with autograd's.
        windowed_training_rows: the same for the windowed operator.
    """

    least_side: int = _bounded(7, 1, NEVER)
    least_width: int = _bounded(15, 1, 255)
    block_bytes: int = _bounded(2**22, 2**12, 2**34)
    block_rows: int = _bounded(784, 1, NEVER)
    backward_rows: int = _bounded(3136, 1, NEVER)
    matrix_bytes: int = _bounded(2**22, 2**12, 2**34)
    ffn_training_rows: int = _bounded(1, 1, NEVER)
    windowed_training_rows: int = _bounded(1, 1, NEVER)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, (least, most) = getattr(self, each.name), each.metadata["bounds"]
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{each.name} {value!r}: expected a whole number from {least} to {most}")
        if self.least_width % 2 == 0:
            raise ValueError(f"least_width {self.least_width}: expected an odd number")


@dataclass(frozen=True, slots=True)
class Profile:
    """Thresholds for each data type, and where they were measured.

    Attributes:
        processor: its name, as the system gives it.
        measured: threads, versions and date.
    """

    processor: str = "AMD EPYC with AVX-512"
    measured: str = "2 threads, torch 2.12.1, November 2026; comes with the package"
    float32: Thresholds = Thresholds()
    bfloat16: Thresholds = Thresholds()

    def of(self, dtype: torch.dtype) -> Thresholds:
        """Those of bfloat16, or of float32 for every other type."""
        return self.bfloat16 if dtype is torch.bfloat16 else self.float32


def thresholds(dtype: torch.dtype) -> Thresholds:
    """Those that hold in this process."""
    return current().of(dtype)


def current() -> Profile:
    """The profile that holds in this process."""
    return _read() if _used is None else _used


_used: Profile | None = None


@contextmanager
def use_profile(profile: Profile) -> Iterator[None]:
    """Another profile, for measurements and tests. What layers have packed under the one before stays packed."""
    global _used
    before, _used = _used, profile
    try:
        yield
    finally:
        _used = before


def default_place() -> Path:
    """Where `--tune` writes, and where a profile is looked for."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wbmm" / "profile.json"


@cache
def _read() -> Profile:
    """The user's profile or the default one; once for a process."""
    named = os.environ.get(VARIABLE)
    if named:
        return load(named)
    place = default_place()
    try:
        if not place.is_file():
            return Profile()
        profile = load(place)
    except (OSError, ValueError) as error:
        log.warning("the defaults are used in place of a profile that cannot be read: %s", error)
        return Profile()
    if profile.processor != processor():
        log.warning("%s was measured on %s, not on this processor, and is not used", place, profile.processor)
        return Profile()
    return profile


def load(path: str | Path) -> Profile:
    """A file of `to_text`; one line says what is wrong with it."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"profile {path}: {error.strerror}") from None
    if len(text) > _MOST_BYTES:
        raise ValueError(f"profile {path}: larger than {_MOST_BYTES} bytes")
    try:
        return parse(text.decode())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError(f"profile {path}: not JSON; `wbmm bench paths --tune` writes one") from None
    except ValueError as error:
        raise ValueError(f"profile {path}: {error}") from None


def parse(text: str) -> Profile:
    """A profile from JSON. Thresholds that it does not name keep their defaults."""
    found = _known(json.loads(text), Profile, "the file")
    for name in ("processor", "measured"):
        if not isinstance(found.get(name), str):
            raise ValueError(f"{name} {found.get(name)!r}: expected a text")
    for name in ("float32", "bfloat16"):
        found[name] = Thresholds(**_known(found.get(name, {}), Thresholds, name))
    return Profile(**found)


def _known(found: object, kind: type, where: str) -> dict:
    """`found`, if it is a dict with no other keys than the fields of `kind`."""
    if not isinstance(found, dict):
        raise ValueError(f"{where}: expected an object, not {type(found).__name__}")
    names = [each.name for each in fields(kind)]
    for name in found:
        if name not in names:
            raise ValueError(f"{where} has {name!r}: expected some of {', '.join(names)}")
    return dict(found)


def to_text(profile: Profile) -> str:
    """The profile as JSON, for `parse`."""
    values = {each.name: getattr(profile, each.name) for each in fields(profile)}
    for name in ("float32", "bfloat16"):
        values[name] = {each.name: getattr(values[name], each.name) for each in fields(Thresholds)}
    return json.dumps(values, indent=2) + "\n"
