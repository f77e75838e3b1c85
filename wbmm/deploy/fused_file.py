"""A checkpoint to its fused inference form, in a file that describes itself: what `wbmm reparam` does."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.data.images import check_batch
from wbmm.io.card import ModelCard, form_of
from wbmm.io.files import describe_source, open_checkpoint, round_weights, write_weights
from wbmm.io.reader import CheckpointFile
from wbmm.machine import versions
from wbmm.models.fuse import fuse
from wbmm.models.state import CheckpointError
from wbmm.text import printable, render_table

__all__ = ["Size", "reparam", "report_difference"]

HEADERS = ("", "form", "parameters M", "stored M", "file MB")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2}


@dataclass(frozen=True)
class Size:
    """How large a model is: its parameters, everything a file stores, and the file."""

    parameters: int
    stored: int
    bytes: int

    @classmethod
    def of(cls, model: nn.Module, path: Path) -> "Size":
        stored = sum(value.numel() for value in model.state_dict().values())
        return cls(sum(p.numel() for p in model.parameters()), stored, path.stat().st_size)

    def row(self, label: str, form: str) -> list[str]:
        return [label, form, f"{self.parameters / 1e6:.2f}", f"{self.stored / 1e6:.2f}", f"{self.bytes / 2**20:.1f}"]


def reparam(args: argparse.Namespace, file: CheckpointFile) -> int:
    """Fuses the model of a file that has been read, and writes it; 1 if `--check` finds a difference."""
    model, card = open_checkpoint(args.input, args.model, args.ema, file=file)
    fused = fuse(model, args.form)
    if form_of(fused) == "training":
        raise CheckpointError(f"{args.input}: there is nothing to fuse in {card.describe()}")
    state_dict = fused.state_dict()
    if args.half:
        state_dict = round_weights(state_dict, torch.float16, "leave --half out")
    fused.load_state_dict(state_dict)  # what the file will hold, rounded if it is in half precision
    if args.check and not _agree(model, fused, card, args):
        return 1
    new = card.replace(
        form=args.form,
        dtype="float16" if args.half else "float32",
        source=describe_source(args.input),
        versions=versions(),
    )
    write_weights(state_dict, new, args.output, args.force)
    _report(model, card, args.input, fused, new, args.output)
    return 0


@torch.inference_mode()
def _agree(model: nn.Module, fused: nn.Module, card: ModelCard, args: argparse.Namespace) -> bool:
    """Whether both forms agree on pictures at the model's size, and at another one that fills no window."""
    images, what = check_batch(card, args.images)
    agree = True
    for batch in (images, images[:2, ..., : images.shape[-2] - 3, : images.shape[-1] - 5]):
        agree &= report_difference(model(batch), fused(batch), f"{what} {tuple(batch.shape)}", args)
    return agree


def report_difference(expected: Tensor, got: Tensor, what: str, args: argparse.Namespace) -> bool:
    """Prints the largest difference and whether it is within the tolerance."""
    scale = max(1.0, expected.abs().max().item())
    difference = (got - expected).abs().max().item()
    tolerance = args.tolerance or TOLERANCE[torch.float16 if args.half else torch.float32]
    good = difference <= tolerance * scale  # false for NaN too
    allowed = f"allowed {tolerance * scale:.2e}"
    text = f"{what}: outputs up to {scale:.3g} differ by at most {difference:.2e}, {allowed}"
    print(text if good else f"{text}: NOT written", file=sys.stdout if good else sys.stderr)
    return good


def _report(model: nn.Module, card: ModelCard, source: Path, fused: nn.Module, new: ModelCard, path: Path) -> None:
    rows = [Size.of(model, source).row(source.name, card.form), Size.of(fused, path).row(path.name, new.form)]
    print(render_table(HEADERS, rows))
    print(f"\n{path}: {new.describe()}, from {printable(new.source['file'])} (sha256 {new.source['sha256'][:12]}...)")
