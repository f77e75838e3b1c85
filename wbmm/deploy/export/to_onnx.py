"""ONNX files: an exported program converted, with our single nodes written as plain ONNX operators.

Sizes that are not constant are taken from the map.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from wbmm.extras import EXPORTERS, need, quiet
from wbmm.io.card import ModelCard
from wbmm.io.digest import DIGEST_KEY, EMPTY, seal
from wbmm.io.reader import METADATA_KEY
from wbmm.ops.reference import opaque_product

from .graph import INPUT_NAME, opaque_convolution, opaque_ffn, roi_features, suppress

__all__ = ["OPSET", "ints", "metadata", "onnx_program", "operators", "save_onnx", "translations"]

OPSET = 20  # the first with GELU
LIMIT = 2**31  # bytes of a protobuf file
_TO_LAST, _TO_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]  # [B, C, H, W] to [B, H, W, C], and back
_PAD_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "edge"}


def onnx_program(
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
    with quiet(*EXPORTERS):
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
    """Calls the dynamic sides `batch`, `height` and `width`, and drops remarks, which name files of this machine."""
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


def save_onnx(converted, card: ModelCard, path: Path) -> None:
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


def translations(convolutions: bool = False) -> dict[Callable, Callable]:
    """For `torch.onnx.export(custom_translation_table=...)`.

    Args:
        convolutions: linears of the feed-forward part as 1x1 convolutions: see `to_openvino.py`.
    """
    ffn = _ffn_by_convolutions if convolutions else _ffn
    return {
        opaque_product._opoverload: _windowed_product,
        opaque_convolution._opoverload: _windowed_convolution,
        opaque_ffn._opoverload: ffn,
        suppress._opoverload: _suppress,
        roi_features._opoverload: _roi_features,
    }


def operators():
    """ONNX's operators, of the version that files are written in."""
    from onnxscript import opset20

    return opset20


def ints(*values: int):
    """A constant of whole numbers."""
    return operators().Constant(value_ints=list(values))


def _windowed_product(x, matrix, window, bias=None, shortcuts=0, padding_mode="zeros"):
    """`wbmm::windowed_product`: pad, partition, multiply, merge, crop."""
    op, (wh, ww), channels = operators(), map(int, window), matrix.shape[0]
    batch, size, grid, padded = _window_sizes(x, wh, ww)
    rows, columns = op.Split(grid, num_outputs=2, axis=0)
    cut = op.Concat(batch, ints(channels), rows, ints(wh), columns, ints(ww), axis=0)
    x = op.Transpose(op.Reshape(_pad(x, size, padded, padding_mode), cut), perm=[1, 0, 2, 4, 3, 5])
    x = op.Reshape(x, ints(channels, -1, wh * ww))

    out = op.MatMul(x, matrix)
    if shortcuts:
        out = op.Add(out, x if shortcuts == 1 else op.Mul(x, op.Constant(value_float=float(shortcuts))))
    if bias is not None:
        out = op.Add(out, op.Reshape(bias, ints(channels, 1, 1)))

    out = op.Reshape(out, op.Concat(ints(channels), batch, grid, ints(wh, ww), axis=0))
    out = op.Transpose(out, perm=[1, 0, 2, 4, 3, 5])
    return _crop(op.Reshape(out, op.Concat(batch, ints(channels), padded, axis=0)), size, padded)


def _windowed_convolution(x, kernel, window, bias=None, padding_mode="zeros"):
    """`wbmm::windowed_convolution`: pad, windows to the batch, convolve, merge, crop.

    Windows are cut from the channels-last map, which is how OpenVINO has it around a convolution: the transpositions
    next to one are free there.
    """
    op, (wh, ww), channels = operators(), map(int, window), kernel.shape[0]
    operands = (kernel,) if bias is None else (kernel, bias)
    reach = [side // 2 for side in kernel.shape[2:]]

    def convolve(windows):
        return op.Conv(windows, *operands, group=channels, pads=[*reach, *reach])

    if list(x.shape[2:]) == [wh, ww]:
        return convolve(x)
    batch, size, grid, padded = _window_sizes(x, wh, ww)
    across = -(-x.shape[3] // ww) if isinstance(x.shape[3], int) else None
    x = _cut(_pad(x, size, padded, padding_mode), batch, grid, window, channels, across)
    windows = op.Transpose(op.Reshape(x, ints(-1, wh, ww, channels)), perm=_TO_FIRST)
    out = op.Transpose(convolve(windows), perm=_TO_LAST)
    out = _merge(out, batch, grid, padded, window, channels, across)
    return _crop(op.Transpose(out, perm=_TO_FIRST), size, padded)


def _cut(x, batch, grid, window, channels: int, across: int | None):
    """A map `[B, C, H, W]` as what can be reshaped to windows `[N, wh, ww, C]`.

    Where the number of windows in a row is known, the map is split into strips as wide as a window, and a strip is a
    number of windows already. OpenVINO copies that once; moving an axis, which is the general form, up to three times.
    """
    op, (wh, ww) = operators(), map(int, window)
    if across is not None:
        strips = op.Concat(*_split(x, across, 3), axis=0)
        return op.Transpose(strips, perm=_TO_LAST)
    rows, columns = op.Split(grid, num_outputs=2, axis=0)
    cut = op.Concat(batch, rows, ints(wh), columns, ints(ww, channels), axis=0)
    return op.Transpose(op.Reshape(op.Transpose(x, perm=_TO_LAST), cut), perm=[0, 1, 3, 2, 4, 5])


def _merge(windows, batch, grid, padded, window, channels: int, across: int | None):
    """Windows `[N, wh, ww, C]`, in the order of `_cut`, as a map `[B, H, W, C]`."""
    op, (wh, ww) = operators(), map(int, window)
    if across is not None:
        height = op.Slice(padded, ints(0), ints(1))
        strips = op.Reshape(windows, op.Concat(ints(-1), height, ints(ww, channels), axis=0))
        return op.Concat(*_split(strips, across, 0), axis=2)
    out = op.Reshape(windows, op.Concat(batch, grid, ints(wh, ww, channels), axis=0))
    out = op.Transpose(out, perm=[0, 1, 3, 2, 4, 5])
    return op.Reshape(out, op.Concat(batch, padded, ints(channels), axis=0))


def _split(x, count: int, axis: int) -> list:
    """Equal parts of a tensor along an axis."""
    return [x] if count == 1 else list(operators().Split(x, num_outputs=count, axis=axis))


def _pad(x, size, padded, mode: str):
    op = operators()
    if padded is size:
        return x
    return op.Pad(x, op.Concat(ints(*[0] * 6), op.Sub(padded, size), axis=0), mode=_PAD_MODES[mode])


def _crop(x, size, padded):
    return x if padded is size else operators().Slice(x, ints(0, 0), size, ints(2, 3))


def _window_sizes(x, wh: int, ww: int):
    """Batch, size, windows in each direction and padded size of a map, constants where they are.

    The padded size is the very same object as the size if nothing is to be padded.
    """
    op = operators()
    batch, size = _sides(x, 0, 1), _sides(x, 2, 4)
    known = [x.shape[2], x.shape[3]]
    if not all(isinstance(side, int) for side in known):
        grid = op.Div(op.Add(size, ints(wh - 1, ww - 1)), ints(wh, ww))
        return batch, size, grid, op.Mul(grid, ints(wh, ww))
    nh, nw = -(-known[0] // wh), -(-known[1] // ww)
    return batch, size, ints(nh, nw), size if [nh * wh, nw * ww] == known else ints(nh * wh, nw * ww)


def _sides(x, start: int, end: int):
    known = [x.shape[i] for i in range(start, end)]
    return ints(*known) if all(isinstance(side, int) for side in known) else operators().Shape(x, start=start, end=end)


def _ffn_by_convolutions(x, gate, shortcut, w1, b1, gamma, w2, b2, eps=1e-6):
    """`wbmm::ffn` on maps `[B, C, H, W]`.

    Between convolutions OpenVINO keeps maps channels-last, so that no transposition is left, computes GELU in the first
    one and adds the shortcut in the second.
    """
    op, one = operators(), operators().Constant(value_float=1.0)
    x = x if gate is None else op.Mul(x, op.Unsqueeze(gate, ints(2, 3)))
    hidden = op.Gelu(op.Conv(x, op.Unsqueeze(w1, ints(2, 3)), b1))
    norm = op.ReduceL2(hidden, ints(2, 3))
    mean = op.Add(op.ReduceMean(norm, ints(1)), op.Constant(value_float=float(eps)))
    scale = op.Add(op.Mul(op.Div(norm, mean), op.Reshape(gamma, ints(-1, 1, 1))), one)
    return op.Add(op.Conv(op.Mul(hidden, scale), op.Unsqueeze(w2, ints(2, 3)), b2), shortcut)


def _ffn(x, gate, shortcut, w1, b1, gamma, w2, b2, eps=1e-6):
    """`wbmm::ffn`: two linears on rows `[BHW, C]`, and between them GELU and the response norm of each sample."""
    op = operators()
    hidden_size, channels = w1.shape
    batch = _sides(x, 0, 1)
    x = op.Transpose(op.Mul(x, op.Unsqueeze(gate, ints(2, 3))), perm=[0, 2, 3, 1])
    hidden = op.Gelu(op.Gemm(op.Reshape(x, ints(-1, channels)), w1, b1, transB=1))
    hidden = op.Reshape(hidden, op.Concat(batch, ints(-1, hidden_size), axis=0))

    # A sum over positions as a product with ones is five times as fast in ONNX Runtime as its reductions.
    positions = op.Concat(ints(1), op.ReduceProd(_sides(shortcut, 2, 4)), axis=0)
    ones = op.Expand(op.Constant(value_float=1.0), positions)
    squares = op.MatMul(ones, op.Mul(hidden, hidden))
    norm = op.Sqrt(op.Max(squares, op.Constant(value_float=1e-30)))
    mean = op.Add(op.ReduceMean(norm, ints(-1)), op.Constant(value_float=float(eps)))
    scale = op.Add(op.Mul(op.Div(norm, mean), gamma), op.Constant(value_float=1.0))

    hidden = op.Reshape(op.Mul(hidden, scale), ints(-1, hidden_size))
    out = op.Gemm(hidden, w2, b2, transB=1)
    out = op.Reshape(out, op.Concat(batch, _sides(shortcut, 2, 4), ints(channels), axis=0))
    return op.Add(op.Transpose(out, perm=[0, 3, 1, 2]), shortcut)


def _suppress(boxes, scores, overlap, above, most):
    o = operators()
    number, limit = (o.Constant(value_float=float(value)) for value in (overlap, above))
    found = o.NonMaxSuppression(boxes, o.Unsqueeze(scores, ints(1)), ints(most), number, limit)  # group, 0, place
    places = o.Gather(found, ints(0, 2), axis=1)
    scores = o.GatherND(scores, places)
    count = o.Min(o.Shape(scores), ints(most))
    best, order = o.TopK(scores, count, axis=0)
    places = o.Gather(places, order, axis=0)
    return o.GatherND(boxes, places), best, o.Squeeze(o.Slice(places, ints(0), ints(1), ints(1)), ints(1))


def _roi_features(maps, boxes, strides, finest, size, sampling):
    o = operators()
    left, top, right, bottom = o.Split(boxes, num_outputs=4, axis=1)
    side = o.Sqrt(o.Mul(o.Sub(right, left), o.Sub(bottom, top)))
    relative = o.Add(o.Div(side, o.Constant(value_float=float(finest))), o.Constant(value_float=1e-6))
    level = o.Floor(o.Div(o.Log(relative), o.Log(o.Constant(value_float=2.0))))
    last = o.Constant(value_float=float(len(maps) - 1))
    level = o.Squeeze(o.Min(o.Max(level, o.Constant(value_float=0.0)), last), ints(1))
    parts, places = [], []
    for number, (part, stride) in enumerate(zip(maps, strides, strict=True)):
        chosen = o.Squeeze(o.NonZero(o.Equal(level, o.Constant(value_float=float(number)))), ints(0))
        rois = o.Gather(boxes, chosen, axis=0)
        batch = o.Mul(chosen, ints(0))
        parts.append(
            o.RoiAlign(
                part,
                rois,
                batch,
                coordinate_transformation_mode="half_pixel",
                output_height=int(size),
                output_width=int(size),
                sampling_ratio=int(sampling),
                spatial_scale=1 / stride,
            )
        )
        places.append(chosen)
    place = o.Concat(*places, axis=0)
    _, order = o.TopK(place, o.Shape(place), axis=0, largest=0)
    return o.Gather(o.Concat(*parts, axis=0), order, axis=0)
