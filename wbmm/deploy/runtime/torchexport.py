"""Programs of `torch.export`, which PyTorch runs."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from wbmm.extras import EXPORTERS, quiet
from wbmm.io.pt2 import check_archive, check_sizes
from wbmm.io.reader import METADATA_KEY

from .runner import Runner, existing, input_sides, parse_card, unreadable

__all__ = ["load_program", "open_program"]


def load_program(path: str | Path) -> tuple[torch.export.ExportedProgram, str | None]:
    """A program of `torch.export` and the text of its card; the file is checked first, since one could hold code."""
    contents = check_archive(existing(path))
    extra = {f"{METADATA_KEY}.json": ""}
    try:
        with quiet(*EXPORTERS):
            program = torch.export.load(contents, extra_files=extra)
    except Exception as error:
        raise unreadable(path, "torch.export", error) from None
    return program, extra[f"{METADATA_KEY}.json"] or None


def open_program(path: Path, device: str) -> Runner:
    """A .pt2 file of `wbmm export`."""
    program, text = load_program(path)
    card = parse_card(path, text)
    if device != "cpu":
        program = torch.export.passes.move_to_device_pass(program, device)
    images = [node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    shapes = [[side if isinstance(side, int) else None for side in node.meta["val"].shape] for node in images]
    batch, size = input_sides(path, card, shapes)
    check_sizes(program, path, card.input_size)
    module = program.module()

    @torch.inference_mode()
    def forward(images: Tensor) -> Sequence[Tensor]:
        outputs = module(images.to(device))
        return [output.cpu() for output in ([outputs] if isinstance(outputs, Tensor) else outputs)]

    return Runner("torch.export", card, forward, batch, size)
