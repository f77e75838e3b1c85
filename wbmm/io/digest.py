"""A checksum of what a file holds, written into every file and compared when it is read.

It finds damage: a flipped bit, a copy that broke off, an .xml beside the .bin of another one. It proves nothing about
who wrote a file. A file without one is read as it is.

A .safetensors or .pth file has the checksum of its tensors and its description. The metadata of an .onnx and of an .xml
file has a slot for it, a key and 64 digits: SHA-256 is taken of the file with zeros in that slot, and after an .xml its
.bin. In a .pt2 it is a part of its own, and the other parts are hashed.
"""

import hashlib
import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from wbmm.models.state import CheckpointError

__all__ = ["DAMAGED", "DIGEST_KEY", "EMPTY", "digest", "digest_of_parts", "mapped", "seal", "verify_digest"]

DIGEST_KEY = "wbmm_sha256"
EMPTY = "0" * 64  # what a slot holds until `seal` fills it
DAMAGED = "damaged: its contents do not match the checksum written with it"
# The key, then what stands before a text of 64 bytes in protobuf or before a value in XML.
_SLOT = re.compile(DIGEST_KEY.encode() + rb'(?:\x12\x40| value=")([0-9a-f]{64})')
_TAIL = 1 << 20  # bytes; metadata comes last in both formats


def digest(tensors: dict[str, Tensor], text: str = "") -> str:
    """SHA-256 of tensors, their names, types and shapes, and of a text; the order of the names does not matter."""
    result = hashlib.sha256(f"{len(text.encode())}:".encode() + text.encode())
    for name, value in sorted(tensors.items()):
        result.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        result.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return result.hexdigest()


def seal(path: str | Path) -> None:
    """Writes the checksum of an .onnx or .xml file, which is complete but for the zeros in its slot."""
    with mapped(path) as data:
        place = _find_slot(data)
        digest = _hash(Path(path), data, place)
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(digest.encode())


def verify_digest(path: str | Path) -> bool:
    """Whether an .onnx or .xml file has a checksum; a `CheckpointError` if it does not match the contents."""
    path = Path(path)
    with mapped(path) as data:
        place = _find_slot(data)
        if place is None:
            return False
        if data[place : place + len(EMPTY)].decode() != _hash(path, data, place):
            raise CheckpointError(f"{path}: {DAMAGED}")
    return True


def digest_of_parts(parts: dict[str, bytes]) -> str:
    """SHA-256 of named contents, in whatever order they come."""
    digest = hashlib.sha256()
    for name, content in sorted(parts.items()):
        digest.update(f"{name}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


@contextmanager
def mapped(path: str | Path) -> Iterator[mmap.mmap | bytes]:
    """The bytes of a file, read when they are looked at."""
    with open(path, "rb") as file:
        if not file.seek(0, 2):  # an empty file cannot be mapped
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def _find_slot(data: mmap.mmap | bytes) -> int | None:
    """Where the digits of the checksum start."""
    first = max(0, len(data) - _TAIL)
    found = list(_SLOT.finditer(data[first:]))
    return first + found[-1].start(1) if found else None


def _hash(path: Path, data: mmap.mmap | bytes, place: int) -> str:
    digest = hashlib.sha256()
    with memoryview(data) as view:
        digest.update(view[:place])
        digest.update(EMPTY.encode())
        digest.update(view[place + len(EMPTY) :])
    if path.suffix == ".xml":
        with mapped(path.with_suffix(".bin")) as weights:
            digest.update(weights)
    return digest.hexdigest()
