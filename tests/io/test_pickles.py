"""The allow-list: each name that a checkpoint may hold is abused, and nothing but plain data comes out."""

import argparse
import resource
import sys
import types
from collections import Counter

import numpy as np
import pytest
import torch

from tests.io.hostile import Build, Call, Name, New, Raw, Stored, emit, tensor, write
from wbmm.io import pickles
from wbmm.io.reader import safe_load
from wbmm.models.state import CheckpointError

NP = "numpy._core.multiarray"
OBJECT_DTYPE = Build(Call(Name("numpy.dtype"), ("O8", False, True)), (3, "|", None, None, None, -1, -1, 63))
# A void dtype with an object inside: NumPy takes the bytes of such an array for pointers.
VOID_DTYPE = Build(
    Call(Name("numpy.dtype"), ("V8", False, True)),
    (3, "|", None, ("x",), {"x": (Call(Name("numpy.dtype"), ("f8", False, True)), 0)}, 8, 1, 63),
)
FLOAT_WITH_FIELDS = Build(
    Call(Name("numpy.dtype"), ("f8", False, True)), (3, "<", None, ("x",), {"x": (1, 0)}, 8, 1, 63)
)
GOOD_DTYPE = Build(Call(Name("numpy.dtype"), ("f8", False, True)), (3, "<", None, None, None, -1, -1, 0))
HISTORY = "mmengine.logging.history_buffer.HistoryBuffer"


def array(dtype, data: bytes, shape=(1,)):
    return Build(Call(Name(f"{NP}._reconstruct"), (Name("numpy.ndarray"), (0,), b"b")), (1, shape, dtype, False, data))


# Every name of the allow-list -> ways to misuse it. A name without one fails the test below.
ABUSE = {
    "collections.OrderedDict": [
        Build(Name("collections.OrderedDict"), (None, {"__init__": 1})),  # a state for the class itself
        Call(Name("collections.OrderedDict"), (7,)),
    ],
    "collections.Counter": [
        Call(Name("collections.Counter"), (7,)),
        Build(Call(Name("collections.Counter"), ({},)), {"update": 1}),
    ],
    "torch._utils._rebuild_tensor_v2": [
        tensor(size=(10**13,), stride=(0,)),  # 40 TB out of one number
        {str(i): tensor(size=(2**20,), stride=(0,)) for i in range(99)},  # 400 MB out of one number
        tensor(size=(2,), stride=(1,), offset=1),  # one element past the end
        tensor(size=(2,), stride=(-1,)),
        tensor(size=(2, 2), stride=(1,)),
        tensor(size=(True,), stride=(1,)),
        tensor(count=10**9),  # a storage larger than its record
        Call(Name("torch._utils._rebuild_tensor_v2"), (b"12345678", 0, (2,), (1,), False, {})),
        Build(tensor(), (tensor(), 0, (10**12,), (1,))),  # Tensor.__setstate__ resizes the storage
    ],
    "torch._utils._rebuild_tensor_v3": [
        Call(
            Name("torch._utils._rebuild_tensor_v3"),
            (Stored(("storage", Name("torch.storage.UntypedStorage"), "0", "cpu", 8)), 0, (8,), (1,), False, {}, None),
        ),
        Call(
            Name("torch._utils._rebuild_tensor_v3"),
            (
                Stored(("storage", Name("torch.storage.UntypedStorage"), "0", "cpu", 8)),
                *(0, (8,), (1,), False, {}, Name("torch.float64")),
            ),
        ),
    ],
    "torch._utils._rebuild_parameter": [Call(Name("torch._utils._rebuild_parameter"), ("text", True, {}))],
    "torch._utils._rebuild_parameter_with_state": [
        Call(Name("torch._utils._rebuild_parameter_with_state"), (3, True, {}, {"__class__": 1}))
    ],
    "torch._tensor._rebuild_from_type_v2": [
        Call(Name("torch._tensor._rebuild_from_type_v2"), (Name("builtins.set"), Name("torch.Tensor"), ([1],), {})),
        Call(Name("torch._tensor._rebuild_from_type_v2"), (Name("builtins.getattr"), 0, (0, "x"), {})),
    ],
    "torch.nn.parameter.Parameter": [
        Call(Name("torch.nn.parameter.Parameter"), (1,)),
        New(Name("torch.nn.parameter.Parameter")),
    ],
    "torch.Tensor": [Call(Name("torch.Tensor"), (10**12,)), New(Name("torch.Tensor"), (10**12,))],
    "torch.Size": [Call(Name("torch.Size"), (["x"],)), Call(Name("torch.Size"), ([-1],))],
    "torch.device": [Call(Name("torch.device"), ({},)), Build(Name("torch.device"), {"__code__": 1})],
    "torch.storage.UntypedStorage": [Call(Name("torch.storage.UntypedStorage"), (10**12,))],
    **{f"torch.{name}Storage": [Call(Name(f"torch.{name}Storage"), (10**12,))] for name in pickles._STORAGES},
    **{str(dtype): [Call(Name(str(dtype)), (1,))] for dtype in pickles._STORAGES.values()},
    "builtins.set": [Call(Name("builtins.set"), ([[]],)), Call(Name("builtins.set"), (7,))],
    "_codecs.encode": [
        Call(Name("_codecs.encode"), ("x", "zip")),
        Call(Name("_codecs.encode"), ("x" * 99, "idna")),
        # the same megabyte 10,000 times over
        [Raw(emit("x" * 2**20) + b"q\x00"), *[Call(Name("_codecs.encode"), (Raw(b"h\x00"), "latin1"))] * 10_000],
    ],
    "argparse.Namespace": [
        New(Name("argparse.Namespace"), ("x",)),
        Build(New(Name("argparse.Namespace")), (None, {"__class__": 1})),
        Build(Name("argparse.Namespace"), {"__eq__": 1}),  # of the class itself, for the whole process
    ],
    "numpy.dtype": [OBJECT_DTYPE, VOID_DTYPE, FLOAT_WITH_FIELDS, Call(Name("numpy.dtype"), (["x"],))],
    "numpy.ndarray": [Call(Name("numpy.ndarray"), ((10**12,),)), New(Name("numpy.ndarray"), ((10**12,),))],
    f"{NP}.scalar": [
        Call(Name(f"{NP}.scalar"), (GOOD_DTYPE, b"1234")),
        Call(Name(f"{NP}.scalar"), (VOID_DTYPE, b"12345678")),
        Call(Name(f"{NP}.scalar"), (GOOD_DTYPE, None)),
    ],
    "numpy.core.multiarray.scalar": [Call(Name("numpy.core.multiarray.scalar"), (OBJECT_DTYPE, b"\x41" * 8))],
    f"{NP}._reconstruct": [
        array(VOID_DTYPE, b"\x41" * 8),
        array(OBJECT_DTYPE, b"\x41" * 8),
        array(GOOD_DTYPE, b"\x41" * 7),
        array(GOOD_DTYPE, b"\x41" * 8, shape=(10**12,)),
        array(GOOD_DTYPE, b"\x41" * 8, shape=(-1,)),
        array(GOOD_DTYPE, ["pointers"]),
    ],
    "numpy.core.multiarray._reconstruct": [Call(Name("numpy.core.multiarray._reconstruct"), (1, 2, 3))],
    HISTORY: [
        New(Name(HISTORY)),
        Build(New(Name(HISTORY)), {"_log_history": array(OBJECT_DTYPE, b"\x41" * 8)}),
        Build(New(Name(HISTORY)), {"_log_history": "x", "_count_history": "y"}),
    ],
    "builtins.getattr": [
        Call(Name("builtins.getattr"), (Name(HISTORY), "__init__")),
        Call(Name("builtins.getattr"), ("text", "format")),
        Call(Name("builtins.getattr"), (Name("numpy.dtype"), "min")),
    ],
}


def test_every_allowed_name_is_abused():
    assert set(ABUSE) == set(pickles._GLOBALS)
    assert all(ABUSE.values())


@pytest.mark.parametrize("name", ABUSE)
def test_abuse_is_refused(name, tmp_path):
    for value in ABUSE[name]:
        path = write(tmp_path / "evil.pth", {"state_dict": {"stem": value}})
        with pytest.raises(CheckpointError, match=r"refused|not a readable|damaged"):
            safe_load(path)


@pytest.mark.parametrize(
    "path",
    [
        *("os.system", "posix.system", "builtins.eval", "builtins.exec", "builtins.type", "subprocess.Popen"),
        *("torch.load", "torch.jit.load", "torch.hub.load", "numpy.load", "numpy.fromfile", "numpy.memmap"),
        *(
            "torch._utils._rebuild_sparse_tensor",
            "torch._utils._rebuild_qtensor",
            "torch._utils._rebuild_nested_tensor",
        ),
        *("torch._utils._rebuild_meta_tensor_no_storage", "torch._utils._rebuild_wrapper_subclass"),
        *(
            "functools.partial",
            "operator.attrgetter",
            "importlib.import_module",
            "pickle.loads",
            "copyreg._reconstructor",
        ),
        *("wbmm.io.pickles._plain", "torch.float8_e4m3fn", "pathlib.PosixPath"),
    ],
)
def test_any_other_name_is_refused(path, tmp_path):
    for value in (Name(path), Call(Name(path), ("x",)), New(Name(path), ("x",))):
        with pytest.raises(CheckpointError, match="refused"):
            safe_load(write(tmp_path / "evil.pth", {"x": value}))


def test_no_class_of_a_library_is_handed_out():
    """What the allow-list gives to a pickle: functions and markers of the reader, and dtypes."""
    for name, value in pickles._GLOBALS.items():
        if isinstance(value, types.FunctionType):
            assert value.__module__ == pickles.__name__, name
        else:
            assert isinstance(value, (pickles._Class, pickles._StorageType, torch.dtype)), name


@pytest.mark.parametrize(
    "code",
    [
        b"\x80\x02]q\x00h\x00a.",  # a list in itself
        b"\x80\x02}q\x00(X\x01\x00\x00\x00ah\x00u.",  # a dict in itself
        b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".",  # 5000 deep
        b"\x80\x02r\xff\xff\xff\x7f.",  # an index of 2 billion into the memo
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a frame of 8 EB
        b"\x80\x05\x96\xff\xff\xff\xff\x0f\x00\x00\x00.",  # a bytearray of 64 GB
        b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",  # a whole number of 2040 bits
        b"\x80\x02X\xff\xff\xff\xffabc.",  # a text of 4 GB
        b"\x80\x02}" * 10,
        b".",
        b"",
    ],
)
def test_programs_that_ask_for_too_much_end_at_once(code, tmp_path):
    with pytest.raises(CheckpointError):
        safe_load(write(tmp_path / "evil.pth", code))


def test_a_flood_of_objects_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(pickles, "MOST_READS", 10_000)
    with pytest.raises(CheckpointError, match="more than 10000 instructions"):
        safe_load(write(tmp_path / "evil.pth", b"\x80\x02" + b"}" * 20_000 + b"."))


def test_a_list_of_lists_of_lists_is_converted_once(tmp_path):
    """Forty lists, each holding the one before twice: 10^12 items if each were copied for itself."""
    code = b"\x80\x02]q\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(40)) + b"."
    value = safe_load(write(tmp_path / "a.pth", code))
    assert value[0] is value[1]


def test_many_tensors_on_one_storage_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pickles, "SPARE_BYTES", 0)
    few = {str(i): tensor(count=256, size=(256,)) for i in range(3)}
    assert len(safe_load(write(tmp_path / "a.pth", few, {"0": bytes(1024)}))) == 3
    many = {str(i): tensor(count=256, size=(256,)) for i in range(40)}
    write(tmp_path / "a.pth", many, {"0": bytes(1024)})
    with pytest.raises(CheckpointError, match="share far smaller storages"):
        safe_load(tmp_path / "a.pth")


def test_what_is_readable(tmp_path):
    mine = {
        "weights": torch.randn(3, 4).t(),
        "half": torch.randn(2).half(),
        "bfloat16": torch.randn(2).bfloat16(),
        "flag": torch.tensor([True, False]),
        "count": torch.tensor(3),
        "nothing": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "args": argparse.Namespace(lr=4e-3, betas=(0.9, 0.999), names={"a", "b"}),
        "best": np.float64(1.5),
        "row": np.arange(6, dtype=np.int32).reshape(2, 3),
        "shape": torch.Size([1, 2]),
        "dtype": torch.float16,
        "device": torch.device("cuda:1"),
        "bytes": b"\x00\xff",
        "milestones": Counter({27: 1, 33: 1}),
        "plain": [None, True, -1, 2**40, 1.5, "text", ("a", 1), {3: "x"}],
    }
    for legacy in (False, True):
        torch.save(mine, tmp_path / "a.pth", _use_new_zipfile_serialization=not legacy)
        read = safe_load(tmp_path / "a.pth")
        for key in ("weights", "half", "bfloat16", "flag", "count", "nothing"):
            assert torch.equal(read[key], mine[key]), key
            assert read[key].stride() == mine[key].stride(), key
        assert torch.equal(read["parameter"], torch.ones(2))
        assert vars(read["args"]) == vars(mine["args"])
        assert (read["best"], read["shape"], read["dtype"], read["device"]) == (1.5, (1, 2), torch.float16, "cuda:1")
        assert read["milestones"].elements
        assert read["milestones"] == mine["milestones"]
        assert np.array_equal(read["row"], mine["row"])
        assert read["row"].dtype == np.int32
        assert (read["bytes"], read["plain"]) == (mine["bytes"], mine["plain"])


def test_shared_storages_stay_shared(tmp_path):
    base = torch.arange(6.0)
    torch.save({"a": base[:3], "b": base[3:], "c": base}, tmp_path / "a.pth")
    read = safe_load(tmp_path / "a.pth")
    assert read["a"].data_ptr() == read["c"].data_ptr()
    assert torch.equal(read["b"], base[3:])


def test_memory_stays_near_the_size_of_the_file(tmp_path):
    """Reading runs with little more address space than the process has, whatever the file claims."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    hostile = [tensor(size=(2**34,), stride=(0,)), array(GOOD_DTYPE, b"", shape=(2**40, 0))]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for value in hostile:
        with pytest.raises(CheckpointError):
            safe_load(write(tmp_path / "evil.pth", {"x": value, "y": tensor(size=(2**34,), stride=(0,))}))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
