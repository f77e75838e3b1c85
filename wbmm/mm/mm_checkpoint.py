"""Checkpoints of segmentors and detectors: read once, recognised, and with their backbone fused (`wbmm reparam`)."""

import argparse
import ast
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from wbmm.data.images import check_batch
from wbmm.deploy.fused_file import HEADERS, Size, report_difference
from wbmm.io.atomic import atomic_path
from wbmm.io.card import MOST_CHANNELS, ModelCard, check_args
from wbmm.io.digest import DIGEST_KEY, digest
from wbmm.io.files import describe_source, round_weights, to_pth
from wbmm.io.reader import METADATA_KEY, safe_load
from wbmm.machine import versions
from wbmm.models.fuse import fuse
from wbmm.models.named_mixers import StageWindow
from wbmm.models.state import CheckpointError, Signature, check_finite, convert_released, find_state_dict, identify
from wbmm.text import printable, render_table
from wbmm.zoo import load_zoo

from .backbone import WBMMBackbone

__all__ = [
    "PREFIX",
    "FuseReport",
    "MMCheckpoint",
    "is_mm",
    "read_mm_checkpoint",
    "read_model",
    "reparam_mm",
    "set_backbone_form",
]

PREFIX = "backbone."
CHECK_SIZE = (3, 250, 333)  # of the photographs that both forms are compared on; it fills no window
# Of a backbone's configuration, what says how it is built; the rest is about training.
_BUILD_KEYS = (
    *("arch", "dims", "pattern", "depths", "window_size", "mixer", "padding_mode"),
    *("ls_init_value", "in_chans", "out_indices"),
)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def read_mm_checkpoint(path: str | os.PathLike) -> dict:
    """The contents of a segmentor's or detector's checkpoint, on the CPU, as plain data."""
    contents = safe_load(os.path.expanduser(path))
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path}: holds a {type(contents).__name__}, not a checkpoint")
    if isinstance(contents.get("meta"), dict):
        contents["meta"].pop("config", None)  # Python that mmengine's resume would run
    return contents


def is_mm(contents: object) -> bool:
    """Whether these are the contents of a segmentor's or detector's checkpoint."""
    if not isinstance(contents, dict):
        return False
    state_dict = contents.get("state_dict", contents)
    return isinstance(state_dict, dict) and any(str(key).startswith(PREFIX) for key in state_dict)


class MMCheckpoint:
    """What a file of mmseg, of mmdet or of the authors holds; a `CheckpointError` if that is no state dict.

    Args:
        contents: of `read_mm_checkpoint`; left as they are.

    Attributes:
        stored: the state dict, as the file has it.
        state_dict: the same with the backbone in our names.
        signature: what the backbone is recognised as, in any form; None if it is none of ours.
    """

    def __init__(self, contents: object) -> None:
        self.contents = contents
        self.stored = find_state_dict(contents)
        self.state_dict = convert_released(self.stored, PREFIX)
        self._inner = {k.removeprefix(PREFIX): v for k, v in self.state_dict.items() if k.startswith(PREFIX)}
        self.signature: Signature | None = identify(self._inner) if self._inner else None

    @property
    def meta(self) -> dict:
        """What the runner noted beside the weights; empty where there is nothing."""
        meta = self.contents.get("meta")
        return meta if isinstance(meta, dict) else {}

    @cached_property
    def backbone_config(self) -> dict:
        """Arguments of `WBMMBackbone`: by the configuration inside the file, or else by its keys and shapes."""
        if self.signature is None:
            some = ", ".join(map(printable, sorted(self.stored)[:3]))
            raise CheckpointError(f"no segmentor or detector on a WBMM backbone: its keys are {some}, ...")
        written = self._written_config()
        if written is not None:
            _check_written(written, self.signature)
        config = _architecture(self.signature, self._inner) if written is None else written
        return {**config, "form": self.signature.form}

    def _written_config(self) -> dict | None:
        text = self.meta.get("cfg")
        model = read_model(text) if isinstance(text, str) else None
        backbone = (model or {}).get("backbone")
        if not isinstance(backbone, dict) or backbone.get("type") != "WBMMBackbone":
            return None
        return {key: backbone[key] for key in _BUILD_KEYS if key in backbone}

    @cached_property
    def backbone(self) -> WBMMBackbone:
        """The backbone with its weights, strictly loaded, in eval mode."""
        backbone = WBMMBackbone(**self.backbone_config, sync_bn=False)
        try:
            backbone.load_state_dict(self._inner)
        except RuntimeError as error:
            raise CheckpointError(
                f"the backbone does not fit the configuration inside the checkpoint: {' '.join(str(error).split())}"
            ) from None
        return backbone.eval()

    def fuse(self, form: str = "compact") -> tuple[dict, "FuseReport"]:
        """Contents with the backbone fused and the heads untouched, for a runner whose backbone has `form=...`.

        The state of the optimiser and of the logs is left out: a fused model cannot be trained further.

        Args:
            form: `compact` or `dense`.
        """
        after = {f"{PREFIX}{key}": value for key, value in fuse(self.backbone, form).state_dict().items()}
        after.update({key: value for key, value in self.stored.items() if not key.startswith(PREFIX)})
        meta = dict(self.meta)
        if isinstance(meta.get("cfg"), str):
            meta["cfg"] = set_backbone_form(meta["cfg"], form)
        kept = {"meta": meta, "state_dict": after}
        report = FuseReport(
            model=str(self.signature),
            form=form,
            elements=(_elements(self.stored), _elements(after)),
            dropped=tuple(sorted(set(map(str, self.contents)) - set(kept))) if "state_dict" in self.contents else (),
        )
        return kept, report


@dataclass(frozen=True)
class FuseReport:
    """What fusing a checkpoint did.

    Attributes:
        model: what the backbone was recognised as.
        form: what it is now.
        elements: numbers stored in the whole state dict, before and after.
        dropped: parts of the file that only training needs, and that are left out.
    """

    model: str
    form: str
    elements: tuple[int, int]
    dropped: tuple[str, ...]


def reparam_mm(args: argparse.Namespace, contents: dict) -> int:
    """Writes a .pth that the runner loads where the backbone's configuration says `form=...`."""
    if args.output.suffix not in (".pth", ".pt"):
        raise ValueError(f"{args.output}: mmseg and mmdet read .pth files; name OUT so")
    try:
        checkpoint = MMCheckpoint(contents)
        check_finite(checkpoint.stored)
        config = checkpoint.backbone_config
        if args.model and args.model != config.get("arch"):
            raise CheckpointError(
                f"its backbone is {printable(config.get('arch', 'of no model of the zoo'))}, not {args.model}"
            )
        fused, report = checkpoint.fuse(args.form)
    except CheckpointError as error:
        raise CheckpointError(f"{args.input}: {error}") from None
    if args.half:
        fused["state_dict"] = round_weights(fused["state_dict"], torch.float16, "leave --half out")
    if args.check and not _agree(checkpoint, MMCheckpoint(fused), args):
        return 1
    card = ModelCard(
        model=config.get("arch", "custom"),
        args={key: value for key, value in config.items() if key not in ("arch", "form")},
        form=args.form,
        num_classes=0,
        kind="features",
        dtype="float16" if args.half else "float32",
        source=describe_source(args.input),
        versions=versions("mmengine", "onedl-mmengine"),
    )
    with atomic_path(args.output, args.force) as temporary:
        sealed = {METADATA_KEY: card.to_json(), DIGEST_KEY: digest(fused["state_dict"], card.to_json())}
        temporary.write_bytes(to_pth({**sealed, **fused}))
    sizes = ((args.input, config["form"], checkpoint.stored), (args.output, args.form, fused["state_dict"]))
    print(render_table(HEADERS, [_size(path, tensors).row(path.name, form) for path, form, tensors in sizes]))
    dropped = f"; left out: {', '.join(map(printable, report.dropped))}" if report.dropped else ""
    print(f"\n{args.output}: backbone {printable(report.model)}{dropped}")
    print(f"in its configuration: model.backbone.form={args.form!r}")
    return 0


@torch.inference_mode()
def _agree(before: MMCheckpoint, after: MMCheckpoint, args: argparse.Namespace) -> bool:
    images, what = check_batch(ModelCard(model="backbone", input_size=CHECK_SIZE), args.images, count=2)
    agree = True
    for i, (expected, got) in enumerate(zip(before.backbone(images), after.backbone(images), strict=True)):
        agree &= report_difference(expected, got, f"{what} {tuple(images.shape)}, map {i}", args)
    return agree


def _size(path: Path, state_dict: dict[str, Tensor]) -> Size:
    parameters = sum(value.numel() for key, value in state_dict.items() if not key.endswith(_STATISTICS))
    return Size(parameters, sum(value.numel() for value in state_dict.values()), path.stat().st_size)


def _elements(state_dict: dict[str, Tensor]) -> int:
    return sum(value.numel() for value in state_dict.values() if value.is_floating_point())


def _check_written(config: dict, seen: Signature) -> None:
    """Raises unless the configuration inside a checkpoint is of the backbone that its weights are of."""
    check_args({key: value for key, value in config.items() if key not in ("arch", "in_chans", "out_indices")})
    model = load_zoo().get(config["arch"]) if isinstance(config.get("arch"), str) else None
    if config.get("arch") is not None and model is None:
        raise CheckpointError(f"the configuration inside it names the backbone {config['arch']!r:.60}; see `wbmm list`")
    dims = tuple(config.get("dims") or (model.dims if model else seen.dims))
    if dims != seen.dims:
        raise CheckpointError(f"the configuration inside it is of channels {dims}, its weights are of {seen.dims}")
    channels = config.get("in_chans", 3)
    if type(channels) is not int or not 1 <= channels <= MOST_CHANNELS:
        raise CheckpointError(
            f"the configuration inside it says in_chans = {channels!r:.60}; valid: 1 to {MOST_CHANNELS}"
        )


def _architecture(seen: Signature, state_dict: dict[str, Tensor]) -> dict:
    """The arguments that the keys and shapes of a state dict tell."""
    indices = tuple(i for i in range(4) if f"norm{i}.weight" in state_dict)
    stem = state_dict.get("stem.conv1.weight")
    channels = stem.shape[1] if stem is not None and stem.ndim == 4 else 3
    config = {"out_indices": indices or (0, 1, 2, 3), "in_chans": channels}
    names = seen.names()
    if names:
        return {"arch": names[0], **config}
    windows = [window or StageWindow((7, 7)) for window in seen.windows]
    sizes = tuple(str(w) if w.hierarchical else w.size for w in windows)
    return {"dims": seen.dims, "pattern": seen.patterns, "window_size": sizes, "mixer": seen.mixer, **config}


MOST_TEXT = 1 << 20  # characters; MMDetection's longest configuration has 20,000


def read_model(text: str) -> dict | None:
    """The `model` dict of a dumped configuration as plain data; None if it is not there or is more than literals."""
    node = _model_node(text)
    if node is None:
        return None
    try:
        value = _literal(node)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def set_backbone_form(text: str, form: str) -> str:
    """The text with `form` set in the model's backbone; as it is if there is no backbone written as `dict(...)`."""
    backbone = _argument(_model_node(text), "backbone")
    if not _is_dict_call(backbone):
        return text
    old = _argument(backbone, "form")
    if old is not None:
        return _splice(text, (old.lineno, old.col_offset), (old.end_lineno, old.end_col_offset), repr(form))
    after_name = (backbone.func.end_lineno, backbone.func.end_col_offset + 1)
    return _splice(text, after_name, after_name, f"form={form!r}, ")


def _model_node(text: str) -> ast.expr | None:
    if len(text) > MOST_TEXT:
        return None
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last: too many brackets inside each other
        return None
    for statement in statements:
        if isinstance(statement, ast.Assign) and [getattr(t, "id", None) for t in statement.targets] == ["model"]:
            return statement.value
    return None


def _argument(call: ast.expr | None, name: str) -> ast.expr | None:
    keywords = call.keywords if isinstance(call, ast.Call) else []
    return next((keyword.value for keyword in keywords if keyword.arg == name), None)


def _is_dict_call(node: ast.expr | None) -> bool:
    """Whether an expression is `dict(name=..., ...)`."""
    return (
        isinstance(node, ast.Call)
        and getattr(node.func, "id", None) == "dict"
        and not node.args
        and all(keyword.arg is not None for keyword in node.keywords)
    )


def _literal(node: ast.expr) -> object:
    """The value of an expression of literals and `dict(name=...)`; `ValueError` for anything else."""
    if isinstance(node, ast.Call):
        if not _is_dict_call(node):
            raise ValueError("more than literals")
        return {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
    if isinstance(node, ast.List | ast.Tuple):
        values = [_literal(item) for item in node.elts]
        return values if isinstance(node, ast.List) else tuple(values)
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_literal(k): _literal(v) for k, v in zip(node.keys, node.values, strict=True)}
    return ast.literal_eval(node)


def _splice(text: str, start: tuple[int, int], end: tuple[int, int], new: str) -> str:
    """Replaces what stands between two positions; ast counts lines from 1 and columns in UTF-8 bytes."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    offset = [sum(len(line) for line in lines[: line_number - 1]) + column for line_number, column in (start, end)]
    data = b"".join(lines)
    return (data[: offset[0]] + new.encode() + data[offset[1] :]).decode()
