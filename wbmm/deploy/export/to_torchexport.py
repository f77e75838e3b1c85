"""Traces a module with `torch.export`, which every format starts from, and writes .pt2 files."""

import io
import operator
import zipfile
from pathlib import Path

import torch
import torch.nn as nn

from wbmm.deploy.packages import EXPORTERS, quiet
from wbmm.io.card import ModelCard
from wbmm.io.digest import digest_of_parts
from wbmm.io.pt2 import DIGEST_PART, OPERATORS
from wbmm.io.reader import METADATA_KEY
from wbmm.text import first_line

from .verify import Shapes

__all__ = ["capture", "check_operators", "save_program"]

# Where in the source an operator comes from: no use in a file, and it holds this machine's paths.
_PRIVATE = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")


@torch.no_grad()
def capture(graph: nn.Module, shapes: Shapes, card: ModelCard) -> torch.export.ExportedProgram:
    """Traces a module; if a dimension cannot be dynamic, it fails and says why."""
    dtype = torch.uint8 if card.input == "uint8" else torch.float32
    example = torch.zeros(shapes.example, dtype=dtype)
    dims = shapes.dims()
    try:
        program = torch.export.export(graph, (example,), dynamic_shapes=(dims,) if dims else None)
    except Exception as error:  # of many kinds: torch._dynamo's, torch.fx's, sympy's
        reason = first_line(error).partition(" For more information")[0]
        raise ValueError(f"{card.model} cannot be exported with {shapes.describe()}: {reason}") from error
    for node in program.graph.nodes:
        for key in _PRIVATE:
            node.meta.pop(key, None)
    program._example_inputs = None  # or the file would hold them, pickled
    return program


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
