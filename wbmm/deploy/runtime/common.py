"""A model that is ready to run, and what every runtime checks of a file first; programs of `torch.export`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.extras import EXPORTERS, quiet
from wbmm.io.card import ModelCard
from wbmm.io.pt2 import check_archive, check_sizes
from wbmm.io.reader import METADATA_KEY
from wbmm.models.state import CheckpointError
from wbmm.text import printable

__all__ = ["Runner", "existing", "input_sides", "last_line", "load_program", "open_program", "parse_card", "unreadable"]

Forward = Callable[[Tensor], Sequence[Tensor]]


class Runner:
    """A model that is ready for inference: `runner(images)`.

    Attributes:
        name: what runs it: `PyTorch, compact`, `ONNX Runtime`, `OpenVINO`, `torch.export`.
        card: what the file says about itself.
        batch: the batch size of the file, None where any will do. Calls with another one are cut and padded to it.
        size: (height, width) of the file, None where any will do.
        net: the module, where PyTorch runs one.
    """

    def __init__(
        self,
        name: str,
        card: ModelCard,
        forward: Forward,
        batch: int | None = None,
        size: tuple[int, int] | None = None,
        net: nn.Module | None = None,
    ) -> None:
        self.name = name
        self.net = net
        self.card = card
        self.batch = batch
        self.size = size
        self._forward = forward

    def __call__(self, images: Tensor) -> Tensor | list[Tensor]:
        """Images `[B, C, H, W]`, as `card.transform()` gives them, to logits `[B, classes]`, or to a list of maps."""
        self._check(images)
        parts = [self._run(part) for part in images.split(self.batch or max(len(images), 1))]
        outputs = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        return outputs[0] if self.card.kind in ("classifier", "segmentor") else outputs

    def _run(self, images: Tensor) -> list[Tensor]:
        count = len(images)
        if self.batch and count < self.batch:
            images = torch.cat([images, images[-1:].expand(self.batch - count, -1, -1, -1)])
        try:
            outputs = self._forward(images)
        except Exception as error:  # each runtime has its own classes
            shape = "x".join(map(str, images.shape))
            raise ValueError(f"{self.name} failed on images of shape {shape}: {last_line(error)}") from error
        self._check_outputs(outputs, images)
        return [output[:count] for output in outputs]

    def _check_outputs(self, outputs: Sequence[Tensor], images: Tensor) -> None:
        """Raises if a file computes something else than its card says."""
        shapes = [tuple(output.shape) for output in outputs]
        good = bool(shapes) and all(shape[:1] == images.shape[:1] for shape in shapes)
        if self.card.kind == "classifier":
            good = good and shapes == [(len(images), self.card.num_classes)]
        if not good:
            raise ValueError(
                f"{self.name} gives outputs of shape {', '.join(map(str, shapes)) or 'none'} for {len(images)} images, "
                f"which does not fit {self.card.describe()}"
            )

    def _check(self, images: Tensor) -> None:
        channels = self.card.input_size[0]
        if images.ndim != 4 or images.shape[1] != channels or not len(images):
            raise ValueError(f"images of shape {tuple(images.shape)}: expected [batch, {channels}, height, width]")
        wanted = torch.uint8 if self.card.input == "uint8" else torch.float32
        if images.dtype != wanted:
            raise ValueError(f"images of type {images.dtype}: the model takes {self.card.input} ones, {wanted}")
        if self.size and tuple(images.shape[2:]) != self.size:
            raise ValueError(
                f"images of {images.shape[2]}x{images.shape[3]} px: the file takes {self.size[0]}x{self.size[1]} px "
                "alone; `wbmm export --dynamic-size` makes one that takes any"
            )


def existing(path: str | Path) -> str:
    """The path as text, if there is such a file."""
    if not Path(path).is_file():
        raise CheckpointError(f"{path}: there is no such file")
    return str(path)


def input_sides(
    path: Path, card: ModelCard, inputs: list[list[int | None]]
) -> tuple[int | None, tuple[int, int] | None]:
    """The batch size and the image size of a file, None where any will do, from the shapes of its inputs."""
    if len(inputs) != 1 or len(inputs[0]) != 4 or inputs[0][1] not in (None, card.input_size[0]):
        shapes = ", ".join(str(shape) for shape in inputs) or "none"
        raise CheckpointError(
            f"{path}: its inputs are of shape {printable(shapes)}; expected one, "
            f"[batch, {card.input_size[0]}, height, width]"
        )
    batch, _, *size = inputs[0]
    return batch, None if None in size else tuple(size)


def parse_card(path: Path, text: str | None) -> ModelCard:
    """The card from the text that a file holds."""
    if not text:
        raise CheckpointError(
            f"{path}: the file does not say what it is (no metadata {METADATA_KEY!r}): write it with `wbmm export`"
        )
    try:
        return ModelCard.from_json(text)
    except Exception as error:  # not JSON, or JSON of something else
        raise CheckpointError(f"{path}: {last_line(error)}") from None


def unreadable(path: str | Path, kind: str, error: Exception) -> CheckpointError:
    """The error for a file that a runtime does not take."""
    return CheckpointError(f"{path}: not a readable {kind} file, perhaps truncated ({last_line(error)})")


def last_line(error: Exception) -> str:
    """What an error of a runtime says in the end: the lines before it tell where in its source it was raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return printable(lines[-1])


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
