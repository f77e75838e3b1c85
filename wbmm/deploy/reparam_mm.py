"""`wbmm reparam` of a segmentor's or a detector's checkpoint: the backbone is fused, the heads stay as they are."""

import argparse

import torch

from wbmm.models.state import CheckpointError, check_finite, find_state_dict
from wbmm.text import printable, render_table

from .atomic import atomic_path
from .card import METADATA_KEY, ModelCard, versions
from .files import describe_source, to_pth
from .photos import photo_batch
from .reparam import HEADERS, report_difference, store

__all__ = ["run_mm"]

CHECK_SIZE = (3, 250, 333)  # fills no window


def run_mm(args: argparse.Namespace, contents: dict) -> int:
    """Writes a .pth that the runner loads where the backbone's configuration says `form=...`."""
    try:
        from wbmm.mm.checkpoint import backbone_config, fuse_mm_checkpoint
    except ImportError as error:
        raise ValueError(
            f"{args.input} is a segmentor's or detector's checkpoint, which needs mmengine ({error}): "
            "in the checkout, pip install '.[seg]' or '.[det]'"
        ) from None
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
    fused["state_dict"] = store(fused["state_dict"], args.half)
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
    from wbmm.mm.checkpoint import build_backbone

    images = photo_batch(ModelCard(model="backbone", input_size=CHECK_SIZE), args.images, count=2)
    before, after = (build_backbone(part)(images) for part in (contents, fused))
    agree = True
    for i, (expected, got) in enumerate(zip(before, after, strict=True)):
        agree &= report_difference(expected, got, f"{tuple(images.shape)}, map {i}", args)
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
