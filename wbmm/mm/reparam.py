"""Checkpoints of segmentors and detectors: recognised, and with their backbone fused."""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from wbmm.data.images import check_batch
from wbmm.deploy.reparam import HEADERS, report_difference
from wbmm.io.atomic import atomic_path
from wbmm.io.card import MOST_CHANNELS, ModelCard, check_args, versions
from wbmm.io.files import describe_source, to_pth
from wbmm.io.reader import METADATA_KEY
from wbmm.io.weights import round_weights
from wbmm.models.fuse import fuse
from wbmm.models.identify import Signature, identify
from wbmm.models.pattern import StageWindow
from wbmm.models.released import convert_released
from wbmm.models.state import CheckpointError, check_finite, find_state_dict
from wbmm.text import printable, render_table
from wbmm.zoo import load_zoo

from .backbone import WBMMBackbone
from .config_text import read_model, set_backbone_form

__all__ = [
    "FuseReport",
    "backbone_config",
    "build_backbone",
    "compare_mm",
    "fuse_mm_checkpoint",
    "is_mm_checkpoint",
    "reparam_mm",
]

PREFIX = "backbone."
# Of a backbone's configuration, what says how it is built; the rest is about training.
_BUILD_KEYS = (
    *("arch", "dims", "pattern", "depths", "window_size", "mixer", "padding_mode"),
    *("ls_init_value", "in_chans", "out_indices"),
)


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


def is_mm_checkpoint(contents: object) -> bool:
    """Whether a file holds a segmentor or detector on a WBMM backbone: our names or released ones, in any form."""
    try:
        return _identify(_backbone_state(contents)) is not None
    except CheckpointError:
        return False


def backbone_config(contents: dict) -> dict:
    """Arguments of `WBMMBackbone` for a checkpoint: by the configuration inside it, or else by its keys and shapes."""
    state_dict = _backbone_state(contents)
    seen = _identify(state_dict)
    if seen is None:
        some = ", ".join(map(printable, sorted(find_state_dict(contents))[:3]))
        raise CheckpointError(f"no segmentor or detector on a WBMM backbone: its keys are {some}, ...")
    written = _written_config(contents)
    if written is not None:
        _check_written(written, seen)
    config = _architecture(seen, state_dict) if written is None else written
    return {**config, "form": seen.form}


def build_backbone(contents: dict) -> WBMMBackbone:
    """The backbone of a checkpoint with its weights, strictly loaded, in eval mode."""
    backbone = WBMMBackbone(**backbone_config(contents), sync_bn=False)
    try:
        backbone.load_state_dict(_backbone_state(contents))
    except RuntimeError as error:
        raise CheckpointError(f"the backbone does not fit the configuration inside the checkpoint. {error}") from None
    return backbone.eval()


def fuse_mm_checkpoint(contents: dict, form: str = "compact") -> tuple[dict, FuseReport]:
    """A checkpoint with its backbone fused and its heads untouched, for a runner whose backbone has `form=...`.

    The state of the optimiser and of the logs is left out: a fused model cannot be trained further.

    Args:
        contents: what the file holds.
        form: `compact` or `dense`.
    """
    before = find_state_dict(contents)
    backbone = build_backbone(contents)
    fused = fuse(backbone, form).state_dict()
    after = {f"{PREFIX}{key}": value for key, value in fused.items()}
    after.update({key: value for key, value in before.items() if not key.startswith(PREFIX)})
    kept = {"meta": _meta_with_form(contents.get("meta"), form), "state_dict": after}
    report = FuseReport(
        model=str(identify(backbone.state_dict())),
        form=form,
        elements=(_elements(before), _elements(after)),
        dropped=tuple(sorted(set(map(str, contents)) - set(kept))) if "state_dict" in contents else (),
    )
    return kept, report


@torch.no_grad()
def compare_mm(before: dict, after: dict, images: Tensor) -> float:
    """The largest difference between the maps that two checkpoints' backbones give."""
    maps = (build_backbone(contents)(images) for contents in (before, after))
    return max((a - b).abs().max().item() for a, b in zip(*maps, strict=True))


def _backbone_state(contents: object) -> dict[str, Tensor]:
    """The backbone's part of a state dict, in our names."""
    state_dict = find_state_dict(contents)
    inner = {key.removeprefix(PREFIX): value for key, value in state_dict.items() if key.startswith(PREFIX)}
    return convert_released(inner)


def _identify(state_dict: dict[str, Tensor]) -> Signature | None:
    return identify(state_dict) if state_dict else None


def _written_config(contents: dict) -> dict | None:
    meta = contents.get("meta")
    text = meta.get("cfg") if isinstance(meta, dict) else None
    model = read_model(text) if isinstance(text, str) else None
    backbone = (model or {}).get("backbone")
    if not isinstance(backbone, dict) or backbone.get("type") != "WBMMBackbone":
        return None
    return {key: backbone[key] for key in _BUILD_KEYS if key in backbone}


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


def _meta_with_form(meta: object, form: str) -> dict:
    meta = dict(meta) if isinstance(meta, dict) else {}
    if isinstance(meta.get("cfg"), str):
        meta["cfg"] = set_backbone_form(meta["cfg"], form)
    return meta


def _elements(state_dict: dict[str, Tensor]) -> int:
    return sum(value.numel() for value in state_dict.values() if value.is_floating_point())


CHECK_SIZE = (3, 250, 333)  # fills no window


def reparam_mm(args: argparse.Namespace, contents: dict) -> int:
    """Writes a .pth that the runner loads where the backbone's configuration says `form=...`."""
    if args.output.suffix not in (".pth", ".pt"):
        raise ValueError(f"{args.output}: mmseg and mmdet read .pth files; name OUT so")
    before = find_state_dict(contents)
    try:
        check_finite(before)
        config = backbone_config(contents)
        if args.model and args.model != config.get("arch"):
            raise CheckpointError(
                f"its backbone is {printable(config.get('arch', 'of no model of the zoo'))}, not {args.model}"
            )
        fused, report = fuse_mm_checkpoint(contents, args.form)
    except CheckpointError as error:
        raise CheckpointError(f"{args.input}: {error}") from None
    if args.half:
        fused["state_dict"] = round_weights(fused["state_dict"], torch.float16, "leave --half out")
    if args.check and not _agree(contents, fused, args):
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
        temporary.write_bytes(to_pth({METADATA_KEY: card.to_json(), **fused}))
    _report(args, config["form"], before, fused["state_dict"])
    dropped = f"; left out: {', '.join(map(printable, report.dropped))}" if report.dropped else ""
    print(f"\n{args.output}: backbone {printable(report.model)}{dropped}")
    print(f"in its configuration: model.backbone.form={args.form!r}")
    return 0


@torch.inference_mode()
def _agree(contents: dict, fused: dict, args: argparse.Namespace) -> bool:
    images, what = check_batch(ModelCard(model="backbone", input_size=CHECK_SIZE), args.images, count=2)
    before, after = (build_backbone(part)(images) for part in (contents, fused))
    agree = True
    for i, (expected, got) in enumerate(zip(before, after, strict=True)):
        agree &= report_difference(expected, got, f"{what} {tuple(images.shape)}, map {i}", args)
    return agree


def _report(args: argparse.Namespace, form: str, before: dict, after: dict) -> None:
    rows = []
    for path, form_, state_dict in ((args.input, form, before), (args.output, args.form, after)):
        statistics = ("running_mean", "running_var", "num_batches_tracked")
        parameters = sum(v.numel() for k, v in state_dict.items() if not k.endswith(statistics))
        stored = sum(v.numel() for v in state_dict.values())
        size = path.stat().st_size / 2**20
        rows.append([path.name, form_, f"{parameters / 1e6:.2f}", f"{stored / 1e6:.2f}", f"{size:.1f}"])
    print(render_table(HEADERS, rows))
