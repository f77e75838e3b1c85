"""ONNX files, with the windowed product as plain ONNX operators."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from wbmm.deploy.card import METADATA_KEY, ModelCard
from wbmm.deploy.runtime import need
from wbmm.io.digest import DIGEST_KEY, EMPTY, seal

from .graph import INPUT_NAME
from .quiet import quiet
from .translate import OPSET, translations

__all__ = ["convert", "metadata", "save"]

LIMIT = 2**31  # of a protobuf file


def convert(
    program: torch.export.ExportedProgram,
    output_names: Sequence[str],
    dims: dict[int, object] | None,
    convolutions: bool = False,
):
    """The `torch.onnx.ONNXProgram` of an exported program; `convolutions` as in `translations`."""
    need("onnx"), need("onnxscript")
    size = sum(value.numel() * value.element_size() for value in program.state_dict.values())
    if size > LIMIT:
        raise ValueError(
            f"{size / 2**30:.1f} GB of weights: an ONNX file holds at most 2 GB; take the compact form or openvino"
        )
    with quiet():
        converted = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=[INPUT_NAME],
            output_names=list(output_names),
            custom_translation_table=translations(convolutions),
        )
    _tidy(converted.model.graph, dims or {})
    return converted


def _tidy(graph, dims: dict[int, object]) -> None:
    """Calls the free sides `batch`, `height` and `width`, and drops remarks, which name files of this machine."""
    import onnx_ir

    names = {str(graph.inputs[0].shape[i]): dim.__name__ for i, dim in dims.items()}

    def rename(side):
        if isinstance(side, int) or side.value is None:
            return side
        return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), side.value)

    for node in graph.all_nodes():
        node.metadata_props.clear()
    for value in [*graph.inputs, *graph.outputs, *(output for node in graph.all_nodes() for output in node.outputs)]:
        value.metadata_props.clear()
        if value.shape is not None:
            value.shape = onnx_ir.Shape([rename(side) for side in value.shape])


def save(converted, card: ModelCard, path: Path) -> None:
    """Writes the file in one piece, with what it is in its metadata."""
    converted.model.metadata_props.update(metadata(card))
    converted.save(path, external_data=False)
    seal(path)


def metadata(card: ModelCard) -> dict[str, str]:
    """The card, what is needed to prepare images in words that other programs can read, and a slot for the checksum."""
    return {
        METADATA_KEY: card.to_json(),
        "input_size": json.dumps(card.input_size),
        "mean": json.dumps(card.mean),
        "std": json.dumps(card.std),
        "interpolation": card.interpolation,
        "crop_pct": str(card.crop_pct),
        "input": card.input,
        "class_names": json.dumps(card.class_names),
        DIGEST_KEY: EMPTY,
    }
