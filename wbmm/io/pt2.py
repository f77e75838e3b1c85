"""Whether a .pt2 file holds a plain program and nothing else; and writes such files.

`torch.export.load` unpickles parts of a file, evaluates its expressions with sympy's `eval`, makes Python source of its
names, finds operators by any dotted name under `torch`, and loads compiled libraries. So a file is read here first, and
only what `wbmm export` writes is let through: raw tensors, operators of a list, and expressions over sizes. What torch
reads is a new archive of the parts that were checked, so that it cannot see another file than was seen here.
"""

import io
import json
import math
import operator
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from wbmm.extras import EXPORTERS, quiet
from wbmm.models.state import CheckpointError
from wbmm.text import first_line, printable

from .card import ModelCard
from .digest import DAMAGED, digest_of_parts
from .reader import METADATA_KEY

__all__ = [
    "DIGEST_PART",
    "OPERATORS",
    "Parts",
    "check_archive",
    "check_operators",
    "check_sizes",
    "read_parts",
    "save_program",
]

# The operators that a program may call. Collected by exporting, with a fixed size, any batch and any size: the
# training, compact and dense forms of the family (plain, hierarchical and multi-kernel, every padding mode), every
# mixer, UniRepLKNet, ConvNeXt with and without WBMM, feature maps, bytes as input, UPerNet, FPN, and ResNet, RegNet,
# EfficientNet, MobileNet, ViT, Swin and RepViT of timm's. Each computes tensors from tensors, or numbers from sizes,
# and nothing else. `wbmm export` names an operator that is missing here: before it is added, make sure that it reads no
# file, writes none and calls nothing that it is given.
_ATEN = """
    _assert_tensor_metadata.default adaptive_avg_pool2d.default add.Tensor add_.Tensor addcmul.default
    alias.default arange.default baddbmm.default batch_norm.default cat.default clamp_min.default
    clone.default contiguous.default conv2d.default div.Tensor div.Tensor_mode dropout.default expand.default
    eye.default
    feature_dropout.default flatten.using_ints flip.default ge.Tensor gelu.default hardsigmoid.default
    hardswish_.default index.Tensor index_select.default layer_norm.default linalg_vector_norm.default
    linear.default logical_and.default lt.Tensor matmul.default max_pool2d.default mean.dim mul.Tensor
    new_ones.default pad.default permute.default relu.default relu_.default reshape.default roll.default
    scaled_dot_product_attention.default select.int sigmoid.default silu_.default slice.Tensor softmax.int
    sqrt.default square.default squeeze.dim stack.default sub.Tensor sum.dim_IntList sym_size.int to.dtype
    transpose.int unbind.int unsqueeze.default upsample_bilinear2d.vec upsample_nearest2d.vec view.default
"""
_ON_SIZES = ("add", "floordiv", "mod", "mul", "neg", "sub")
_OURS = "torch.ops.wbmm.windowed_product.default"

OPERATORS = frozenset(
    [*(f"torch.ops.aten.{name}" for name in _ATEN.split()), *(f"_operator.{name}" for name in _ON_SIZES), _OURS]
)


DIGEST_PART = "extra/wbmm.sha256"
MOST_PARTS = 100_000
MOST_ELEMENTS = 2**30  # of one tensor, 4 GB in float32
_RECORDS = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/(version|serialization_id)|models/model\.json"
    r"|data/weights/(weight_\d+|model_weights_config\.json)|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|data/sample_inputs/model\.pt|extra/wbmm\.(json|sha256)"
)
_PROGRAM, _SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
# By torch's numbers: uint8, int8, int16, int32, int64, float16, float32, float64, bool, bfloat16.
_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 2, 7: 4, 8: 8, 12: 1, 13: 2}
_STRIDED = 7

# The kinds of arguments that programs of ours have. Not among them, and able to do harm: graphs, operators and objects.
_KINDS = {
    *(
        "as_none",
        "as_bool",
        "as_bools",
        "as_int",
        "as_ints",
        "as_float",
        "as_floats",
        "as_string",
        "as_name",
        "as_expr",
    ),
    *("as_tensor", "as_tensors", "as_optional_tensor", "as_optional_tensors", "as_sym_int", "as_sym_ints"),
    *("as_sym_float", "as_sym_floats", "as_sym_bool", "as_scalar_type", "as_memory_format", "as_layout", "as_device"),
}
_STRINGS = {"none", "tanh", "constant", "zeros", "reflect", "replicate", "floor", "trunc"}  # modes of operators
_SPECS = {"user_input", "parameter", "buffer", "tensor_constant", "user_output"}
_NAME = re.compile(r"(?!.*__(?!\d))[A-Za-z_][A-Za-z0-9_.]*", re.ASCII)  # `relu__1` is a node, `__class__` no name
_VERSION = re.compile(r"[\w.+-]*", re.ASCII)
_EXPRESSION = re.compile(r"[\w\s()',=-]*", re.ASCII)
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NUMBER = re.compile(r"\d+", re.ASCII)
_SYMBOL = re.compile(r"[suz]\d+", re.ASCII)
_SIDE = re.compile(r"L\['images'\]\.size\(\)\[[0-3]\]")
_GUARD = re.compile(r"(?!.*\*\*)[\d\s()%=!*/+<>-]*", re.ASCII)
_WORDS = {
    *("Symbol", "Integer", "Add", "Mul", "Mod", "Max", "Min", "FloorDiv", "CeilDiv", "CleanDiv", "PythonMod", "Pow"),
    *("Eq", "Ne", "Equality", "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan"),
    *("Not", "And", "Or", "true", "false", "True", "False", "positive", "nonnegative", "integer"),
}
_LONGEST, _LARGEST, _LARGEST_POWER = 20_000, 2**31, 8
_TREE_TYPES = {None, "builtins.tuple", "builtins.list", "builtins.dict"}


class _Strange(Exception):
    """Something that no file of ours has, in a few words."""


@dataclass
class Parts:
    """The contents of a .pt2 file.

    Attributes:
        contents: by name, without the folder that they are all in.
        sealed: whether they were compared with a checksum.
    """

    contents: dict[str, bytes]
    sealed: bool


def read_parts(path: str | Path) -> Parts:
    """The parts of a .pt2 file; a `CheckpointError` if they are damaged or the archive is not a plain one."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            _check_entries(entries, Path(path).stat().st_size)
            parts = {entry.filename.partition("/")[2]: archive.read(entry) for entry in entries}  # compares CRCs
    except _Strange as strange:
        raise CheckpointError(f"{path}: refused, since it is no plain archive ({strange}); {_ADVICE}") from None
    except Exception as error:
        if "Bad CRC-32" in str(error):
            raise CheckpointError(f"{path}: {DAMAGED}") from None
        raise _unreadable(path, error) from None
    digest = parts.pop(DIGEST_PART, None)
    if digest is not None and digest != digest_of_parts(parts).encode():
        raise CheckpointError(f"{path}: {DAMAGED}")
    return Parts(parts, digest is not None)


def check_archive(path: str | Path) -> io.BytesIO:
    """The contents of a .pt2 file, or a `CheckpointError` if there is anything in it that could run."""
    parts = read_parts(path).contents
    try:
        _check_parts(parts)
    except _Strange as strange:
        raise CheckpointError(
            f"{path}: refused, since it could run code when loaded ({printable(strange)}); {_ADVICE}"
        ) from None
    except Exception as error:  # not JSON, or of another structure
        raise _unreadable(path, error) from None
    contents = io.BytesIO()
    with zipfile.ZipFile(contents, "w") as archive:
        for name in list(parts):
            archive.writestr(f"model/{name}", parts.pop(name))
    contents.seek(0)
    return contents


_ADVICE = "take one of `wbmm export`"


def _unreadable(path: str | Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: not a readable torch.export file, perhaps truncated ({first_line(error)})")


def _check_entries(entries: list[zipfile.ZipInfo], size: int) -> None:
    """Raises before anything is read, so that nothing larger than the file itself ever is."""
    names = [entry.filename for entry in entries]
    if len(entries) > MOST_PARTS:
        raise _Strange(f"{len(entries)} parts")
    if len(set(names)) < len(names):
        raise _Strange("two parts of one name")
    for entry in entries:
        odd = [step for step in entry.filename.split("/") if step in ("", ".", "..")]
        if odd or "\\" in entry.filename or "\0" in entry.orig_filename:
            raise _Strange(f"a part called {printable(entry.orig_filename)!r}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise _Strange("a part that is compressed or encrypted")
    if sum(entry.file_size for entry in entries) > size:
        raise _Strange("parts that share their bytes")
    if len({name.partition("/")[0] for name in names}) != 1 or not all("/" in name for name in names):
        raise _Strange("parts outside its folder")


def _check_parts(parts: dict[str, bytes]) -> None:
    strange = [name for name in parts if not _RECORDS.fullmatch(name)]
    if strange:
        raise _Strange(f"the part {strange[0]!r}")
    if parts[_SAMPLES]:
        raise _Strange("a pickle")
    for name in _CONFIGS:
        config = json.loads(parts[name].decode())
        for key, payload in config["config"].items():
            _check_payload(key, payload, parts, Path(name).parent.as_posix())
    _check_program(json.loads(parts[_PROGRAM].decode()))


def _check_payload(key: str, payload: dict, parts: dict[str, bytes], folder: str) -> None:
    """Raises unless a tensor is stored raw and whole: no fewer bytes than it has elements."""
    if not _NAME.fullmatch(key):
        raise _Strange(f"a tensor called {key!r}")
    if payload["use_pickle"] is not False or not re.fullmatch(r"(weight|tensor)_\d+", payload["path_name"]):
        raise _Strange("a pickle")
    meta = payload["tensor_meta"]
    _check_device(meta["device"])
    if meta["layout"] != _STRIDED or meta["dtype"] not in _BYTES:
        raise _Strange(f"{key} of layout {meta['layout']} and type {meta['dtype']}")
    sizes, strides = ([_whole(side["as_int"]) for side in meta[field]] for field in ("sizes", "strides"))
    offset = _whole(meta["storage_offset"]["as_int"])
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    needed = max(math.prod(sizes), last + 1 if all(sizes) else 0) * _BYTES[meta["dtype"]]
    held = len(parts[f"{folder}/{payload['path_name']}"])
    if needed > held or (not held and sizes != [0]):
        raise _Strange(f"{key} of {needed} bytes, of which {held} are there")


def _whole(number: object) -> int:
    if type(number) is not int or not 0 <= number < 2**62:
        raise _Strange(f"{number!r} as a size")
    return number


def _check_device(device: dict) -> None:
    if device["type"] != "cpu":
        raise _Strange(f"the device {device['type']!r}")


def _check_program(program: dict) -> None:
    module = program["graph_module"]
    graph, signature = module["graph"], module["signature"]
    if module.get("metadata") or module.get("treespec_namedtuple_fields") or graph.get("custom_obj_values"):
        raise _Strange("objects or remarks beside the graph")
    for node in graph["nodes"]:
        if node["target"] not in OPERATORS:
            raise _Strange(f"the operator {node['target']!r}")
        if node["metadata"]:
            raise _Strange("remarks on an operator")
    for spec in (*signature["input_specs"], *signature["output_specs"]):
        if not set(spec) <= _SPECS:
            raise _Strange(f"the input or output {next(iter(spec))!r}")
    _check_texts(program)


def _check_texts(value: object, key: str = "") -> None:
    """Raises at the first text, or name of a field, that is not of a known kind."""
    if isinstance(value, str):
        if not _is_plain(value, key):
            raise _Strange(f"{key} {value[:80]!r}")
    elif isinstance(value, list):
        for item in value:
            _check_texts(item, key)
    elif isinstance(value, dict):
        for name, child in value.items():
            if not _NAME.fullmatch(name) or (name.startswith("as_") and name not in _KINDS):
                raise _Strange(f"the field {name[:80]!r}")
            _check_texts(child, name)


def _is_plain(text: str, key: str) -> bool:
    if key == "target":
        return text in OPERATORS
    if key == "as_string":
        return text in _STRINGS
    if key == "type":
        return text == "cpu"  # of a device
    if key == "expr_str":
        return _is_expression(text)
    if key == "guards_code":
        rest = _SIDE.sub("1", text)
        return len(text) <= _LONGEST and _GUARD.fullmatch(re.sub(r"\b(not|and|or)\b", " ", rest)) is not None
    if key in ("in_spec", "out_spec"):
        return _is_plain_tree(json.loads(text))
    if key == "torch_version":
        return _VERSION.fullmatch(text) is not None
    return text == "" or _NAME.fullmatch(text) is not None


def _is_expression(text: str) -> bool:
    """Whether sympy may evaluate it: known functions of symbols and numbers, none of which grows without bound."""
    if len(text) > _LONGEST or not _EXPRESSION.fullmatch(text):
        return False
    if not all(word in _WORDS or _SYMBOL.fullmatch(word) for word in _WORD.findall(text)):
        return False
    largest = max((int(number) for number in _NUMBER.findall(re.sub(r"[suz]\d+", "", text))), default=0)
    powers = text.count("Pow")
    return largest <= _LARGEST if not powers else largest <= _LARGEST_POWER and powers <= 2


def _is_plain_tree(spec: object) -> bool:
    """Whether a description of nested inputs is of tuples, lists and dicts alone."""
    if isinstance(spec, list):
        return all(isinstance(item, int) or _is_plain_tree(item) for item in spec)
    return (
        isinstance(spec, dict)
        and spec.get("type") in _TREE_TYPES
        and spec.get("context") in (None, "null", "[]")
        and all(map(_is_plain_tree, spec.get("children_spec", ())))
    )


class _Sizes(torch.fx.Interpreter):
    """Runs a program without memory behind its tensors, and stops where one would be too large."""

    def run_node(self, node: torch.fx.Node) -> object:
        result = super().run_node(node)
        for leaf in tree_leaves(result):
            size = leaf.numel() if isinstance(leaf, Tensor) else leaf if type(leaf) is int else 0
            if (isinstance(leaf, Tensor) and size > MOST_ELEMENTS) or abs(size) >= 2**63:
                raise _Strange(f"{node.name} has {size:.3g} elements")
        return result


def check_sizes(program: torch.export.ExportedProgram, path: str | Path, image: tuple[int, int, int]) -> None:
    """A `CheckpointError` if a tensor that a program computes would not fit into any memory.

    Args:
        program: that was loaded from a checked file.
        path: for the message.
        image: (channels, height, width) of two images to imagine, where the program takes any number and size.
    """
    with FakeTensorMode():
        inputs = [_imagined(node.meta["val"], (2, *image)) for node in program.graph.nodes if node.op == "placeholder"]
        try:
            _Sizes(program.graph_module).run(*inputs)
        except _Strange as strange:
            reason = first_line(strange)  # the interpreter adds where it was
            raise CheckpointError(f"{path}: refused, since {reason}; {MOST_ELEMENTS} are allowed") from None


def _imagined(value: Tensor, usual: tuple[int, int, int, int]) -> Tensor:
    """A tensor without memory; only images have sides that are free."""
    if all(isinstance(side, int) for side in value.shape):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    shape = [side if isinstance(side, int) else free for side, free in zip(value.shape, usual, strict=True)]
    return torch.empty(shape, dtype=value.dtype)


def check_operators(program: torch.export.ExportedProgram, card: ModelCard) -> None:
    """Raises if a program has an operator that `check_archive` would not let in again."""
    called = {node.target for node in program.graph.nodes if node.op == "call_function"} - {operator.getitem}
    for target in called:
        name = f"torch.ops.{target}" if isinstance(target, torch._ops.OpOverload) else f"_operator.{target.__name__}"
        if name not in OPERATORS:
            raise ValueError(f"{card.model} computes {name}, which .pt2 files may not hold here; take onnx or openvino")


def save_program(program: torch.export.ExportedProgram, card: ModelCard, path: Path) -> None:
    """Writes the file with its card and its checksum."""
    contents = io.BytesIO()  # torch's own writer ends the process when a disk is full
    with quiet(*EXPORTERS):
        torch.export.save(program, contents, extra_files={f"{METADATA_KEY}.json": card.to_json()})
    with zipfile.ZipFile(contents, "a") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
        root = next(iter(parts)).partition("/")[0]
        digest = digest_of_parts({name.partition("/")[2]: content for name, content in parts.items()})
        archive.writestr(f"{root}/{DIGEST_PART}", digest)
    path.write_bytes(contents.getbuffer())
