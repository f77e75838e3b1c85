"""OpenVINO files in INT8, by NNCF, and in FP16."""

import logging
import os
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
from torch import Tensor

from wbmm.deploy.export.to_openvino import save_openvino
from wbmm.deploy.runtime import read_openvino
from wbmm.extras import need
from wbmm.io.card import ModelCard
from wbmm.ops.backends.onednn.windowed import is_convolvable, kernel_size
from wbmm.ops.profile import Profile, use_profile

from .choose import FOLLOWS, RESHAPES, Layer, group_of_product, mark_head

__all__ = ["OpenVino"]

LARGEST = 3.4e38  # about the largest float32
_CONVOLUTIONS = {"Convolution": "convolution", "GroupConvolution": "depthwise"}
_FOLDED = RESHAPES | {"Gather", "Multiply"}
# What carries numbers along without computing new ones.
_CARRIERS = RESHAPES | {"Parameter", "Constant", "Result", "Pad", "Slice", "StridedSlice", "Gather", "Concat"}


class OpenVino:
    """What can be done with a float model in OpenVINO's format.

    Args:
        path: the .xml file.
        card: its card.
        full_range: weights of 8 bits instead of 7. A processor without VNNI adds pairs of products in 16 bits, which
            weights of 8 bits may overflow.
    """

    suffix = ".xml"
    runtime = "OpenVINO"
    packages = ("openvino", "nncf")
    # INT8 is no faster here: each takes a pass over the map to round it, depthwise convolutions of windows have no INT8
    # kernel, and gates are a row times a small matrix.
    float_groups = ("depthwise", "window", "gate")

    def __init__(self, path: Path, card: ModelCard, full_range: bool = False) -> None:
        self.path, self.card, self.full_range = path, card, full_range

    def layers(self) -> list[Layer]:
        nodes = read_openvino(self.path).get_ordered_ops()
        return mark_head([Layer(node.get_friendly_name(), group) for node in nodes if (group := _group(node))])

    def quantize(self, images: Tensor, keep: set[str], path: Path) -> None:
        """Writes the model with all layers but `keep` in INT8, calibrated on `images`."""
        nncf = need("nncf")
        logging.getLogger("nncf").setLevel(logging.ERROR)
        from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, OverflowFix
        from nncf.quantization.range_estimator import RangeEstimatorParametersSet

        model = read_openvino(self.path)
        # Shortcuts, norms, gates and GRN stay in float, where NNCF would quantise their sums and squares as well.
        kept = [node.get_friendly_name() for node in model.get_ordered_ops() if _is_elementwise(node)]
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # its bars would be drawn into ours
            model = nncf.quantize(
                model,
                nncf.Dataset([image[None].numpy() for image in images]),
                subset_size=len(images),
                preset=nncf.QuantizationPreset.MIXED,
                ignored_scope=nncf.IgnoredScope(names=[*kept, *sorted(keep)], validate=False),
                advanced_parameters=AdvancedQuantizationParameters(
                    overflow_fix=OverflowFix.DISABLE if self.full_range else OverflowFix.ENABLE,
                    # NNCF's defaults (ranges averaged over images, biases corrected) gave three times the noise here.
                    activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX,
                    disable_bias_correction=True,
                ),
            )
        _fence_shortcuts(model)
        save_openvino(model, self.card.replace(dtype="int8"), path)

    def convert(self, precision: str, path: Path) -> None:
        """Writes the model with its weights in fp16; a CPU computes in float32 all the same."""
        save_openvino(read_openvino(self.path), self.card.replace(dtype="float16"), path, half=True)


def _fence_shortcuts(model) -> None:
    """Keeps the scale of each second linear of a feed-forward part in front of the shortcut.

    OpenVINO would move the scale behind that sum and through what cuts the windows, and multiply the shortcut with its
    inverse: more passes over the map. A scale does not move past a maximum, and one with the least number is nothing.
    """
    from openvino import opset13

    for node in model.get_ordered_ops():
        if node.get_type_name() != "Convolution" or _group(node) != "reduce":
            continue
        last = node
        while len(takers := last.output(0).get_target_inputs()) == 1 and _is_bias(next(iter(takers)).get_node()):
            last = next(iter(takers)).get_node()
        fence = opset13.maximum(last.output(0), opset13.constant(np.float32(-LARGEST)))
        for taker in takers:
            taker.replace_source_output(fence.output(0))


def _group(node) -> str | None:
    kind = node.get_type_name()
    if kind == "Convolution" and list(node.input(1).get_shape())[2:] == [1, 1]:  # linears of the feed-forward part
        return FOLLOWS.get(_follows(node), "reduce")
    if kind == "GroupConvolution" and _convolves_windows(node):
        return "window"
    if kind != "MatMul":
        return _CONVOLUTIONS.get(kind)
    constant = _is_constant(node.input_value(1).get_node())
    return group_of_product(list(node.input(1).get_shape()) if constant else None, _follows(node))


def _convolves_windows(node) -> bool:
    """Whether a depthwise convolution is that of windows: `table_to_kernel` tells the kernel from the window's size."""
    sides = [side.get_length() if side.is_static else 0 for side in list(node.input(0).get_partial_shape())[2:]]
    with use_profile(Profile()):  # as in export
        return is_convolvable(sides) and list(node.input(1).get_shape())[3:] == kernel_size(sides)


def _is_elementwise(node) -> bool:
    """Whether a node computes something and is neither a product nor the bias of one."""
    return _group(node) is None and node.get_type_name() not in _CARRIERS and not _is_bias(node)


def _follows(node) -> str | None:
    """The type of what takes a node's result, past a bias and changes of shape."""
    takers = [taker.get_node() for taker in node.output(0).get_target_inputs()]
    if len(takers) != 1:
        return None
    kind = takers[0].get_type_name()
    return _follows(takers[0]) if kind in RESHAPES or _is_bias(takers[0]) else kind


def _is_bias(node) -> bool:
    return node.get_type_name() == "Add" and any(
        _is_constant(node.input_value(i).get_node()) for i in range(node.get_input_size())
    )


def _is_constant(node) -> bool:
    """Whether a value depends on nothing but constants."""
    if node.get_type_name() == "Constant":
        return True
    if node.get_type_name() not in _FOLDED:
        return False
    return all(_is_constant(node.input_value(i).get_node()) for i in range(node.get_input_size()))
