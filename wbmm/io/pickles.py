"""Pickles from strangers: a reader that builds plain data and dense tensors, and can call nothing else.

A pickle is a program: it names functions and classes, calls them, and sets the state of what they return. Here each
name that may stand in a checkpoint has a stand-in of ours, which checks what it is given before anything is allocated;
no function or class of PyTorch, NumPy or mmengine is ever handed to the pickle. `torch.load(weights_only=True)` is not
enough: to read log buffers it must be told to trust NumPy's classes, whose state may hold raw pointers, and it builds
tensors of any declared size.
"""

import argparse
import functools
import importlib
import math
import pickle
import types
from collections import Counter
from collections.abc import Callable
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

__all__ = ["Storage", "UnreadableTensor", "read_pickle"]

MOST_READS = 3_000_000  # of the stream, an instruction or two; a run of wbmm_s with its optimiser takes about 300,000
MOST_NESTED = 64
MOST_SHARING = 16  # how many times over the tensors may cover their storages: tied weights do so two or three times
SPARE_BYTES = 256 << 20

_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}
_NUMBERS = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1", "?")
_HISTORY = "mmengine.logging.history_buffer.HistoryBuffer"
_STATISTICS = ("min", "max", "current", "mean")


class UnreadableTensor(ValueError):
    """A tensor that is not dense, or that does not lie inside its storage."""


class Storage:
    """The numbers behind tensors: `data` is a flat tensor of the storage's dtype."""

    def __init__(self, data: Tensor) -> None:
        self.data = data


class _StorageType:
    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype  # None: bytes, whose dtype comes with the tensor


class _Mapping(dict):
    """An OrderedDict. Its state (`_metadata` of a state dict) is left out."""

    def set_state(self, state: object) -> None:
        pass


class _Counts(dict):
    """A Counter."""


class _NumberType:
    """A NumPy dtype, one of a fixed list; the state that comes with it may say the byte order and nothing else."""

    def __init__(self, name: str) -> None:
        self.dtype = np.dtype(name)

    def set_state(self, state: object) -> None:
        plain = isinstance(state, tuple) and len(state) >= 5 and state[1] in ("<", "|", "=")
        if not plain or any(part is not None for part in state[2:5]):
            raise pickle.UnpicklingError("a NumPy dtype with fields, a shape or a foreign byte order")


class _Array:
    """A NumPy array, from its shape, dtype and bytes."""

    value: np.ndarray | None = None

    def set_state(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise pickle.UnpicklingError("a NumPy array of an unknown form")
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _NumberType) or not isinstance(data, bytes) or not _are_sizes(shape):
            raise pickle.UnpicklingError("a NumPy array that is not of plain numbers")
        if math.prod(shape) * dtype.dtype.itemsize != len(data):
            raise pickle.UnpicklingError(f"a NumPy array of shape {shape} with {len(data)} bytes")
        self.value = np.frombuffer(data, dtype.dtype).reshape(shape, order="F" if fortran else "C")


class _Record:
    """An object of which only the attributes are kept."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.values: dict = {}

    def set_state(self, state: object) -> None:
        if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
            raise pickle.UnpicklingError(f"a {self.kind} with a state that is not its attributes")
        self.values = state


class _Class:
    """A class that a pickle may name to make a `_Record` of it, or only name (`numpy.ndarray`)."""

    def __init__(self, kind: str, instances: bool = False) -> None:
        self.kind = kind
        self.instances = instances


def _are_sizes(values: object) -> bool:
    return isinstance(values, tuple) and len(values) <= 16 and all(type(v) is int and 0 <= v < 2**48 for v in values)


def _rebuild_tensor(storage, offset, size, stride, requires_grad=False, hooks=None, metadata=None, *, dtype=None):
    if not isinstance(storage, Storage) or not _are_sizes((offset,)) or not _are_sizes(size) or not _are_sizes(stride):
        raise UnreadableTensor("a tensor whose storage, offset, size or strides are not what they should be")
    data = storage.data if dtype is None else storage.data.view(dtype)
    count = math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if count else 0
    if count and last >= data.numel():
        raise UnreadableTensor(f"a tensor of size {size} and strides {stride} on a storage of {data.numel()}")
    return data.as_strided(size, stride, offset) if count else data.new_empty(size)


def _rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, metadata=None):
    if dtype not in _STORAGES.values():
        raise UnreadableTensor(f"a tensor of type {dtype}")
    return _rebuild_tensor(storage, offset, size, stride, dtype=dtype)


def _rebuild_parameter(data, requires_grad=True, hooks=None, state=None):
    if not isinstance(data, Tensor):
        raise UnreadableTensor("a parameter without a tensor")
    return data


def _rebuild_with_attributes(function, kind, args, state):
    if function not in (_rebuild_tensor, _rebuild_tensor_v3, _rebuild_parameter) or not isinstance(args, tuple):
        raise UnreadableTensor("a tensor of a class of its own")
    return function(*args)


def _ordered_dict(*pairs) -> _Mapping:
    return _Mapping(*pairs)


def _counts(counts: dict) -> _Counts:
    return _Counts(counts)


def _set(items=()) -> set:
    return set(items)


def _size(values=()) -> tuple:
    if not _are_sizes(tuple(values)):
        raise pickle.UnpicklingError(f"torch.Size of {values!r:.80}")
    return tuple(values)


def _device(kind="cpu", index=None) -> str:
    return f"{kind:.20}" if index is None else f"{kind:.20}:{int(index)}"


def _number_type(name="f8", *flags) -> _NumberType:
    if name not in _NUMBERS:
        raise pickle.UnpicklingError(f"a NumPy dtype {name!r:.40}, not one of plain numbers")
    return _NumberType(name)


def _number(kind, data):
    if not isinstance(kind, _NumberType) or not isinstance(data, bytes) or len(data) != kind.dtype.itemsize:
        raise pickle.UnpicklingError("a NumPy scalar that is not one plain number")
    return np.frombuffer(data, kind.dtype)[0].item()


def _array(kind, shape, code) -> _Array:
    return _Array()


def _statistic(owner, name) -> str:
    """mmengine stores the statistics of a log buffer as `getattr(HistoryBuffer, name)`: four names are known."""
    if not isinstance(owner, _Class) or owner.kind != _HISTORY or name not in _STATISTICS:
        raise pickle.UnpicklingError(f"getattr of {name!r:.40} is not allowed")
    return name


def _latin1(text, encoding):
    """How protocol 2 stores bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError(f"text in the encoding {encoding!r:.40}")
    return text.encode("latin1")


# Everything that a pickle may name, and what it gets instead: a function of this file, which checks its arguments, a
# marker that can be passed to one of them, or a dtype. Why each is needed stands beside it.
_GLOBALS: dict[str, object] = {
    "collections.OrderedDict": _ordered_dict,  # every state dict: becomes a dict
    "collections.Counter": _counts,  # the milestones of a schedule
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,  # every tensor
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,  # tensors whose dtype has no storage class of its own
    "torch._utils._rebuild_parameter": _rebuild_parameter,  # nn.Parameter saved as such: becomes its tensor
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,  # the same with attributes, which are left out
    "torch._tensor._rebuild_from_type_v2": _rebuild_with_attributes,  # tensors with attributes, which are left out
    "torch.nn.parameter.Parameter": _Class("Parameter"),  # an argument of the one above
    "torch.Tensor": _Class("Tensor"),
    "torch.Size": _size,  # shapes kept beside weights: a tuple
    "torch.device": _device,  # where something was: text
    "torch.storage.UntypedStorage": _StorageType(None),
    **{f"torch.{name}Storage": _StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{str(dtype): dtype for dtype in _STORAGES.values()},  # torch.float32 and so on, kept as they are
    "builtins.set": _set,  # lists of names in foreign checkpoints
    "_codecs.encode": _latin1,  # bytes, in NumPy scalars and arrays
    "argparse.Namespace": _Class("argparse.Namespace", instances=True),  # the arguments of timm's and others' scripts
    "numpy.dtype": _number_type,  # the type of the scalars and arrays below
    "numpy.ndarray": _Class("numpy.ndarray"),  # an argument of _reconstruct
    **{f"{core}.scalar": _number for core in ("numpy._core.multiarray", "numpy.core.multiarray")},  # best accuracies
    **{f"{core}._reconstruct": _array for core in ("numpy._core.multiarray", "numpy.core.multiarray")},  # log buffers
    _HISTORY: _Class(_HISTORY, instances=True),  # the log buffers of mmengine's runner
    "builtins.getattr": _statistic,  # inside those buffers
}
_FUNCTIONS = {value for value in _GLOBALS.values() if isinstance(value, types.FunctionType)}
_CONTAINERS = {"SETITEM": dict, "SETITEMS": dict, "APPEND": list, "APPENDS": list}
# Protocols 2 and 3. Left out: frames and buffers (the reads would not be counted), extension codes, INST and OBJ.
_OPCODES = (
    *("PROTO", "STOP", "MARK", "POP", "POP_MARK", "DUP", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "INT", "LONG", "FLOAT"),
    *("BINUNICODE", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "EMPTY_DICT", "LIST", "DICT"),
    *("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL", "BINPERSID", "REDUCE", "NEWOBJ", "BUILD"),
    *_CONTAINERS,
)


class _Stream:
    """What an unpickler reads from: it ends a pickle of too many instructions, and reads no further than its length."""

    def __init__(self, file: BinaryIO, length: int) -> None:
        self.file = file
        self.left = length
        self.reads = 0

    def read(self, size: int) -> bytes:
        return self._take(self.file.read(min(size, self.left)), size)

    def readline(self) -> bytes:
        return self._take(self.file.readline(min(self.left, 4096)), 1)

    def _take(self, data: bytes, wanted: int) -> bytes:
        self.left -= len(data)
        self.reads += 1
        if len(data) < wanted:
            raise EOFError("it ends in the middle")
        if self.reads > MOST_READS:  # each may make an object of 200 bytes out of one
            raise pickle.UnpicklingError(f"more than {MOST_READS} instructions")
        return data


class _Unpickler(pickle._Unpickler):  # Python's own: C's allocates a table as long as the largest index in the file
    def __init__(self, file, load_storage: Callable) -> None:
        super().__init__(file, encoding="utf-8")
        self.load_storage = load_storage
        self.most_encoded = self.encoded = 0
        self.covered = 0
        self.stored: dict[int, int] = {}

    def find_class(self, module: str, name: str) -> object:
        full = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if full in _GLOBALS:
            return _GLOBALS[full]
        if full.startswith("torch._utils._rebuild_") or full.startswith("torch._tensor._rebuild"):
            raise UnreadableTensor(f"a tensor made by {full:.80}, which is not a dense one")
        raise pickle.UnpicklingError(f"{full:.120}")

    def persistent_load(self, pid: object) -> Storage:
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], _StorageType):
            raise UnreadableTensor("a storage of an unknown form")
        _, kind, key, _, count, *view = pid
        if not isinstance(key, str) or not _are_sizes((count,)) or any(part is not None for part in view):
            raise UnreadableTensor("a storage of an unknown form")
        storage = self.load_storage(key, kind.dtype or torch.uint8, count)
        self.stored[id(storage)] = storage.data.nbytes
        return storage

    def call(self) -> None:
        args, function = self.stack.pop(), self.stack[-1]
        if not isinstance(function, types.FunctionType) or function not in _FUNCTIONS or not isinstance(args, tuple):
            raise pickle.UnpicklingError("a call of something that is no function")
        result = function(*args)
        if isinstance(result, bytes):
            self.encoded += len(result)
        elif isinstance(result, Tensor) and function in (_rebuild_tensor, _rebuild_tensor_v3, _rebuild_with_attributes):
            self.covered += result.nbytes
            if self.covered > MOST_SHARING * sum(self.stored.values()) + SPARE_BYTES:
                raise UnreadableTensor(f"tensors of {self.covered} bytes that share far smaller storages")
        if self.encoded > self.most_encoded:
            raise pickle.UnpicklingError("the same bytes over and over")
        self.stack[-1] = result

    def make(self) -> None:
        args, kind = self.stack.pop(), self.stack[-1]
        if kind is _ordered_dict and args == ():
            self.stack[-1] = _Mapping()
        elif isinstance(kind, _Class) and kind.instances and args == ():
            self.stack[-1] = _Record(kind.kind)
        else:
            raise pickle.UnpicklingError("an object of a class that is not allowed")

    def set_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, (_Mapping, _NumberType, _Array, _Record)):
            raise pickle.UnpicklingError(f"a state for a {type(target).__name__}")
        target.set_state(state)


def _guarded(name: str, kind: type) -> Callable:
    """The instruction, if what it adds to is the container that it is meant for."""
    several = name.endswith("S")
    original = pickle._Unpickler.dispatch[getattr(pickle, name)[0]]

    @functools.wraps(original)
    def instruction(self: _Unpickler) -> None:
        depth = 1 if kind is list else 2
        target = self.metastack[-1][-1] if several else self.stack[-1 - depth]
        if not isinstance(target, kind):
            raise pickle.UnpicklingError(f"items for a {type(target).__name__}")
        original(self)

    return instruction


_Unpickler.dispatch = {
    **{getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES},
    **{getattr(pickle, name)[0]: _guarded(name, kind) for name, kind in _CONTAINERS.items()},
    pickle.REDUCE[0]: _Unpickler.call,
    pickle.NEWOBJ[0]: _Unpickler.make,
    pickle.BUILD[0]: _Unpickler.set_state,
}


def read_pickle(file: BinaryIO, length: int, load_storage: Callable[[str, torch.dtype, int], Storage]) -> object:
    """The plain data of one pickle.

    Args:
        file: stands at the start of the pickle, and at its end afterwards.
        length: of the pickle, or of what is left of the file.
        load_storage: gives the storage of a key, with a dtype and a number of elements.

    Returns:
        Dicts, lists, tuples, sets, text, bytes, numbers, None, dtypes, dense tensors, NumPy arrays of plain numbers,
        `argparse.Namespace` and, if mmengine is installed, its log buffers. Nothing contains itself.
    """
    unpickler = _Unpickler(_Stream(file, length), load_storage)
    unpickler.most_encoded = 2 * length
    try:
        value = unpickler.load()
    except KeyError as error:
        raise ValueError(f"byte {error} is not an instruction that a pickle of weights needs") from None
    return _plain(value, 0, {})


def _plain(value: object, depth: int, done: dict[int, object]) -> object:
    """`value` with every stand-in replaced by what it stands for; each object is converted once."""
    if value is None or isinstance(value, (bool, float, str, bytes, Tensor, torch.dtype)):
        return value
    if isinstance(value, int):
        if value.bit_length() > 128:
            raise pickle.UnpicklingError("a whole number of more than 128 bits")
        return value
    if id(value) in done:
        if done[id(value)] is done:
            raise pickle.UnpicklingError(f"a {type(value).__name__.strip('_')} that contains itself")
        return done[id(value)]
    if depth > MOST_NESTED:
        raise pickle.UnpicklingError(f"data nested more than {MOST_NESTED} deep")
    done[id(value)] = done  # in the making
    plain = functools.partial(_plain, depth=depth + 1, done=done)
    if isinstance(value, dict):
        result = {plain(key): plain(item) for key, item in value.items()}
        result = Counter(result) if isinstance(value, _Counts) else result
    elif isinstance(value, (list, tuple, set)):
        result = type(value)(plain(item) for item in value)
    elif isinstance(value, _Array) and value.value is not None:
        result = value.value
    elif isinstance(value, _Record):
        attributes = {key: plain(item) for key, item in value.values.items()}
        result = _history(attributes) if value.kind == _HISTORY else argparse.Namespace(**attributes)
    else:
        raise pickle.UnpicklingError(f"a {type(value).__name__.strip('_')} by itself")
    done[id(value)] = result
    return result


def _history(values: dict) -> object:
    """A log buffer of mmengine, or its values as a dict where mmengine is not installed."""
    arrays = [values.get("_log_history"), values.get("_count_history")]
    if not all(isinstance(array, np.ndarray) and array.ndim == 1 for array in arrays):
        raise pickle.UnpicklingError("a log buffer without its two rows of numbers")
    try:
        buffer = importlib.import_module("mmengine.logging.history_buffer").HistoryBuffer
    except (ImportError, AttributeError):
        return {"log": arrays[0], "count": arrays[1]}
    limit = values.get("_max_length", 1_000_000)
    return buffer(*(array.tolist() for array in arrays), max_length=limit if type(limit) is int and limit > 0 else 1)
