"""One reader for every checkpoint file, which never runs what is in it and notices when it is damaged."""

import io
import pickle
import stat
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from wbmm.models.state import CheckpointError
from wbmm.text import first_line

from .digest import DAMAGED, DIGEST_KEY, digest
from .pickles import Storage, UnreadableTensor, read_pickle

__all__ = ["METADATA_KEY", "CheckpointFile", "check_is_file", "read_checkpoint", "safe_load"]

METADATA_KEY = "wbmm"  # where a file's description stands
EXPORTED = (".onnx", ".xml")  # of an exporter; a .pt2 is read, as a zip
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # of the files of torch.save before 1.6
LEGACY_PROTOCOL = 1001
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")


class Damaged(ValueError):
    """Contents that do not match the checksum stored with them."""


@dataclass(frozen=True)
class CheckpointFile:
    """A file that has been read.

    Attributes:
        path: where it is.
        contents: what it holds: of a .safetensors its tensors, of a .pth or .pt whatever was saved.
        description: the JSON of its card, where it has one.
    """

    path: Path
    contents: object
    description: str | None = None


def safe_load(path: str | Path) -> object:
    """The contents of a .pth, .pt or .safetensors file, on the CPU; safe as `read_checkpoint` is."""
    return read_checkpoint(path).contents


def read_checkpoint(path: str | Path) -> CheckpointFile:
    """Reads a .pth, .pt or .safetensors file, once, to the CPU.

    A pickle may hold dense tensors and plain data only; one that asks for more is refused and never run. The checksums
    that a file carries are compared: those of a zip's records, and the digest in files that this project wrote.
    """
    path = Path(path)
    check_is_file(path)
    if path.suffix in EXPORTED:
        raise CheckpointError(
            f"{path} is an exported file, which holds no checkpoint: give the one that it was made from. To run it: "
            "wbmm predict, or wbmm.deploy.runtime.open_runner in Python"
        )
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        with open(path, "rb") as file:
            contents = _read_zip(file) if zipfile.is_zipfile(file) else _read_legacy(file)
        _compare_digest(contents)
        description = contents.get(METADATA_KEY) if isinstance(contents, dict) else None
        return CheckpointFile(path, contents, description if isinstance(description, str) else None)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: refused, since it is not only tensors and plain data and could run code when loaded "
            f"({first_line(error)})"
        ) from None
    except UnreadableTensor as error:
        raise CheckpointError(f"{path}: refused, since it holds {first_line(error)}") from None
    except Damaged as error:
        raise CheckpointError(f"{path}: {error}; copy or download it again") from None
    except Exception as error:
        raise CheckpointError(f"{path}: not a readable checkpoint, perhaps truncated ({first_line(error)})") from None


def check_is_file(path: Path) -> None:
    """Raises unless `path` is a regular file: reading a pipe would wait for ever."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError, ValueError))
        raise CheckpointError(f"{path}: {'there is no such file' if missing else error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: {'a folder' if stat.S_ISDIR(mode) else 'a pipe or a device'}, not a file")


def _read_safetensors(path: Path) -> CheckpointFile:
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (it is no dict)
        metadata = file.metadata() or {}
    if DIGEST_KEY in metadata and metadata[DIGEST_KEY] != digest(tensors, metadata.get(METADATA_KEY, "")):
        raise Damaged(DAMAGED)
    return CheckpointFile(path, tensors, metadata.get(METADATA_KEY))


def _compare_digest(contents: object) -> None:
    """The digest of a .pth of `save_model`."""
    if not isinstance(contents, dict) or not isinstance(contents.get(DIGEST_KEY), str):
        return
    tensors, text = contents.get("state_dict"), contents.get(METADATA_KEY, "")
    whole = isinstance(tensors, dict) and isinstance(text, str)
    whole = whole and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in tensors.items())
    if not whole or contents[DIGEST_KEY] != digest(tensors, text):
        raise Damaged(DAMAGED)


class _Archive:
    """The records of a zip file of `torch.save`: stored as they are, each with its CRC-32."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = file.seek(0, io.SEEK_END)
        members = [member for member in zipfile.ZipFile(file).infolist() if not member.is_dir()]
        self.members = {member.filename: member for member in members}
        if len(self.members) < len(members):
            raise Damaged("damaged: it has two records of one name")
        roots = {name.partition("/")[0] for name in self.members}
        self.root = roots.pop() if len(roots) == 1 else ""
        if f"{self.root}/constants.pkl" in self.members:
            raise pickle.UnpicklingError("a TorchScript program, not weights")
        if f"{self.root}/data.pkl" not in self.members:
            raise ValueError("no record data.pkl: a zip file, but none of torch.save")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise UnreadableTensor("compressed records, which torch.save does not write")
        if sum(member.file_size for member in members) > self.size:
            raise Damaged("damaged: its records are larger than the file")
        # torch.serialization.set_crc32_options(False) leaves them all at 0.
        self.checked = any(member.CRC for member in members)
        if f"{self.root}/byteorder" in self.members and bytes(self.read("byteorder").numpy()) != b"little":
            raise UnreadableTensor("numbers in big-endian order")

    def read(self, name: str) -> Tensor:
        """The bytes of a record."""
        member = self.members.get(f"{self.root}/{name}")
        if member is None:
            raise Damaged(f"damaged: the record {name!r:.60} is missing")
        self.file.seek(member.header_offset)
        signature, *_, name_length, extra_length = _LOCAL_HEADER.unpack(self.file.read(_LOCAL_HEADER.size))
        start = self.file.seek(name_length + extra_length, io.SEEK_CUR)
        if signature != b"PK\x03\x04" or start + member.file_size > self.size:
            raise Damaged(f"damaged: the record {name!r:.60} is cut off")
        data = torch.empty(member.file_size, dtype=torch.uint8)
        view = memoryview(data.numpy())
        if view.nbytes and self.file.readinto(view) != view.nbytes:
            raise Damaged(f"damaged: the record {name!r:.60} is cut off")
        if self.checked and zlib.crc32(view) != member.CRC:
            raise Damaged(f"damaged: the checksum of its record {name!r:.60} does not match")
        return data


def _read_zip(file: BinaryIO) -> object:
    archive = _Archive(file)
    storages: dict[str, Storage] = {}

    def load_storage(key: str, dtype: torch.dtype, count: int) -> Storage:
        if key not in storages:
            storages[key] = Storage(_typed(archive.read(f"data/{key}"), dtype, count))
        return _same_type(storages[key], dtype)

    program = bytes(archive.read("data.pkl").numpy())
    return read_pickle(io.BytesIO(program), len(program), load_storage)


def _typed(data: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    if count * dtype.itemsize != data.nbytes:
        raise UnreadableTensor(f"a storage of {count} elements of {dtype} in {data.nbytes} bytes")
    return data.clamp_(max=1).view(dtype) if dtype == torch.bool else data.view(dtype)


def _same_type(storage: Storage, dtype: torch.dtype) -> Storage:
    if storage.data.dtype != dtype:
        raise UnreadableTensor(f"a storage that is {storage.data.dtype} in one place and {dtype} in another")
    return storage


def _read_legacy(file: BinaryIO) -> object:
    """A file of torch.save before 1.6: four pickles, then the storages in the order of the last one's keys."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)

    def part(load_storage=_no_storage) -> object:
        return read_pickle(file, size - file.tell(), load_storage)

    if (part(), part()) != (LEGACY_MAGIC, LEGACY_PROTOCOL):
        raise ValueError("neither a zip file nor one of the older format of torch.save")
    system = part()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise UnreadableTensor("numbers in big-endian order")
    storages: dict[str, Storage] = {}
    claimed = [0]

    def load_storage(key: str, dtype: torch.dtype, count: int) -> Storage:
        if key not in storages:
            claimed[0] += count * dtype.itemsize
            if claimed[0] > size:
                raise EOFError(f"its tensors take {claimed[0]} bytes, the file has {size}")
            storages[key] = Storage(torch.empty(count, dtype=dtype))
        return _same_type(storages[key], dtype)

    contents, keys = part(load_storage), part()
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or set(keys) != set(storages):
        raise ValueError("the list of its storages does not fit its contents")
    for key in keys:
        data = storages[key].data
        if struct.unpack("<q", file.read(8)) != (data.numel(),):
            raise ValueError(f"the storage {key!r:.60} has another length than its tensors say")
        view = memoryview(data.view(torch.uint8).numpy())
        if view.nbytes and file.readinto(view) != view.nbytes:
            raise EOFError("it ends in the middle of a tensor")
        if data.dtype == torch.bool:
            data.view(torch.uint8).clamp_(max=1)
    return contents


def _no_storage(*_) -> Storage:
    raise UnreadableTensor("a tensor where none should be")
