"""A program of `torch.export`, and the .pt2 file."""

import io
from pathlib import Path

import torch
import torch.nn as nn

from wbmm.deploy.card import METADATA_KEY, ModelCard

from .quiet import quiet
from .shapes import Shapes

__all__ = ["capture", "save"]

# Where in the source an operator comes from: no use in a file, and it holds this machine's paths.
_PRIVATE = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")


@torch.no_grad()
def capture(graph: nn.Module, shapes: Shapes, card: ModelCard) -> torch.export.ExportedProgram:
    """Traces a module; what cannot be free as asked is an error."""
    dtype = torch.uint8 if card.input == "uint8" else torch.float32
    example = torch.zeros(shapes.example, dtype=dtype)
    dims = shapes.dims()
    try:
        program = torch.export.export(graph, (example,), dynamic_shapes=(dims,) if dims else None)
    except Exception as error:  # of many kinds: torch._dynamo's, torch.fx's, sympy's
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = lines[0].partition(" For more information")[0]
        raise ValueError(f"{card.model} cannot be exported with {shapes.describe()}: {reason}") from error
    for node in program.graph.nodes:
        for key in _PRIVATE:
            node.meta.pop(key, None)
    program._example_inputs = None  # or the file would hold them, pickled
    return program


def save(program: torch.export.ExportedProgram, card: ModelCard, path: Path) -> None:
    contents = io.BytesIO()  # torch's own writer ends the process when a disk is full
    with quiet():
        torch.export.save(program, contents, extra_files={f"{METADATA_KEY}.json": card.to_json()})
    path.write_bytes(contents.getbuffer())
