"""Pickles written instruction by instruction, as a stranger would, and files around them."""

import pickle
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Name:
    """A global, `module.name`."""

    path: str


@dataclass
class Call:
    """`function(*args)`."""

    function: object
    args: tuple = ()


@dataclass
class New:
    """An object of a class, made without calling it."""

    kind: object
    args: tuple = ()


@dataclass
class Build:
    """An object, and the state to be set on it."""

    target: object
    state: object


@dataclass
class Stored:
    """A storage of a checkpoint, by its persistent id."""

    pid: tuple


@dataclass
class Raw:
    """Instructions as they are."""

    code: bytes


def emit(value: object) -> bytes:
    """The instructions that leave `value` on the stack."""
    if isinstance(value, Raw):
        return value.code
    if isinstance(value, Name):
        module, _, name = value.path.rpartition(".")
        return pickle.GLOBAL + f"{module}\n{name}\n".encode()
    if isinstance(value, Call):
        return emit(value.function) + emit(tuple(value.args)) + pickle.REDUCE
    if isinstance(value, New):
        return emit(value.kind) + emit(tuple(value.args)) + pickle.NEWOBJ
    if isinstance(value, Build):
        return emit(value.target) + emit(value.state) + pickle.BUILD
    if isinstance(value, Stored):
        return emit(value.pid) + pickle.BINPERSID
    if isinstance(value, (tuple, list)):
        items = b"".join(map(emit, value))
        kind = pickle.TUPLE if isinstance(value, tuple) else pickle.LIST
        return pickle.MARK + items + kind
    if isinstance(value, dict):
        return pickle.MARK + b"".join(emit(k) + emit(v) for k, v in value.items()) + pickle.DICT
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return pickle.BINUNICODE + struct.pack("<I", len(data)) + data
    if isinstance(value, bytes):
        return pickle.BINBYTES + struct.pack("<I", len(value)) + value
    return pickle.dumps(value, protocol=2)[2:-1]  # None, numbers


def program(value: object) -> bytes:
    return pickle.PROTO + b"\x02" + emit(value) + pickle.STOP


def tensor(storage: str = "0", size=(2,), stride=(1,), count=2, offset=0, kind="torch.FloatStorage") -> Call:
    """A tensor of a checkpoint, with whatever it claims."""
    stored = Stored(("storage", Name(kind), storage, "cpu", count))
    return Call(Name("torch._utils._rebuild_tensor_v2"), (stored, offset, size, stride, False, {}))


def write(
    path: Path, value: object, storages: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED
) -> Path:
    """A .pth of `torch.save`'s layout around a hand-made pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", value if isinstance(value, bytes) else program(value))
        archive.writestr("archive/byteorder", "little")
        for key, data in (storages or {"0": bytes(8)}).items():
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", "3\n")
    return path
