"""ONNX files in INT8 and FP16, by ONNX Runtime's own tools."""

import tempfile
import zlib
from pathlib import Path

from torch import Tensor

from wbmm.deploy.export.to_onnx import metadata
from wbmm.extras import need, quiet
from wbmm.io.card import ModelCard
from wbmm.io.digest import seal

from .choose import RESHAPES, Layer, group_of_product, mark_head

__all__ = ["Onnx", "to_half"]

# GRN squares the activations of a map and adds them up: at 56 x 56 that is soon above 65504.
_SUMS = {"Max", "Clip", "Sqrt", "Pow", "ReduceSum", "ReduceL2", "ReduceSumSquare"}


def to_half(model):
    """The model with weights and activations in fp16; inputs, outputs, squares and their sums stay float32."""
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    constants = {tensor.name for tensor in model.graph.initializer}
    sums = [node.name for node in model.graph.node if _is_sum(node, constants)]
    half = convert_float_to_float16(model, keep_io_types=True, op_block_list=[], node_block_list=sums)
    _join(half.graph)
    OnnxModel(half).topological_sort()
    return half


def _is_sum(node, constants: set[str]) -> bool:
    square = node.op_type == "Mul" and node.input[0] == node.input[1]
    return square or node.op_type in _SUMS or (node.op_type == "MatMul" and node.input[0] in constants)


def _join(graph) -> None:
    """Lets one float32 node read what another one wrote: the converter puts fp16 between them, and some casts twice."""
    import onnx

    casts = {node.output[0]: node for node in graph.node if node.op_type == "Cast"}
    kind = {name: node.attribute[0].i for name, node in casts.items()}
    wide, narrow = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
    source = {
        name: casts[node.input[0]].input[0]
        for name, node in casts.items()
        if kind[name] == wide and kind.get(node.input[0]) == narrow
    }
    for node in graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = source.get(name, name)
    nodes = {node.output[0]: node for node in graph.node}
    used = {name for node in nodes.values() for name in node.input} | {value.name for value in graph.output}
    kept = [node for name, node in nodes.items() if node.op_type != "Cast" or name in used]
    del graph.node[:]
    graph.node.extend(kept)
    del graph.value_info[:]  # the converter's types are not right everywhere, and runtimes infer them anyway


class Onnx:
    """What can be done with a float model in an ONNX file.

    Args:
        path: the file.
        card: its card.
        full_range: weights of 8 bits instead of 7, for processors with VNNI.
    """

    suffix = ".onnx"
    runtime = "ONNX Runtime"
    packages = ("onnx", "onnxruntime")
    float_groups = ()

    def __init__(self, path: Path, card: ModelCard, full_range: bool = False) -> None:
        need("onnx"), need("onnxruntime")
        self.path, self.card, self.full_range = path, card, full_range
        self._folder = tempfile.TemporaryDirectory()
        self._prepared = Path(self._folder.name) / "prepared.onnx"
        self._prepare()

    def _prepare(self) -> None:
        """Constants folded and shapes inferred, as the quantiser wants it."""
        from onnxruntime.quantization.shape_inference import quant_pre_process

        with quiet(""):  # its advice goes to the root logger
            quant_pre_process(self.path, self._prepared, skip_symbolic_shape=True)

    def layers(self) -> list[Layer]:
        graph = self._graph()
        weights = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        takers: dict[str, list] = {}
        for node in graph.node:
            for name in node.input:
                takers.setdefault(name, []).append(node)
        groups = {node.name: self._group(node, takers, weights) for node in graph.node}
        return mark_head([Layer(name, group) for name, group in groups.items() if group])

    def _group(self, node, takers: dict[str, list], weights: dict[str, list[int]]) -> str | None:
        if node.op_type == "Conv":
            return "depthwise" if next((a.i for a in node.attribute if a.name == "group"), 1) > 1 else "convolution"
        if node.op_type in ("MatMul", "Gemm"):
            return group_of_product(weights.get(node.input[1]), _follows(node, takers, weights))
        return None

    def _graph(self):
        import onnx

        return onnx.load(self._prepared).graph

    def _window_weights(self) -> list[str]:
        """The matrices of windowed products. ONNX Runtime's kernels know one scale for a stack of matrices."""
        graph = self._graph()
        stacks = {tensor.name for tensor in graph.initializer if len(tensor.dims) > 2}
        return [node.input[1] for node in graph.node if node.op_type == "MatMul" and node.input[1] in stacks]

    def quantize(self, images: Tensor, keep: set[str], path: Path) -> None:
        """Writes the model with all layers but `keep` in INT8, calibrated on `images`."""
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

        class Reader(CalibrationDataReader):
            def __init__(self, name: str) -> None:
                self.feeds = ({name: image[None].numpy()} for image in images)

            def get_next(self):
                return next(self.feeds, None)

        with quiet(""):  # its advice goes to the root logger
            quantize_static(
                self._prepared,
                path,
                Reader(self._graph().input[0].name),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=["Conv", "MatMul", "Gemm"],
                per_channel=True,
                reduce_range=not self.full_range,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                nodes_to_quantize=[layer.name for layer in self.layers() if layer.name not in keep],
                extra_options={
                    # What follows a product (a bias, GELU, GRN) is computed in float: no need to round its result.
                    "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"],
                    "QDQOpTypePerChannelSupportToAxis": {"MatMul": -1},
                    "TensorQuantOverrides": {name: [{"symmetric": True}] for name in self._window_weights()},
                },
                calibration_cache_path=Path(self._folder.name) / f"ranges-{zlib.crc32(images.numpy())}.json",
            )
        self._describe(path, "int8")

    def convert(self, precision: str, path: Path) -> None:
        """Writes the model in fp16, with inputs and outputs in float32."""
        import onnx

        with quiet(""):  # its advice goes to the root logger
            onnx.save(to_half(onnx.load(self.path)), path)
        self._describe(path, "float16")

    def _describe(self, path: Path, dtype: str) -> None:
        import onnx

        model = onnx.load(path)
        onnx.helper.set_model_props(model, metadata(self.card.replace(dtype=dtype)))
        onnx.save(model, path)
        seal(path)


def _follows(node, takers: dict[str, list], weights: dict) -> str | None:
    """The type of what takes a node's result, past a bias and changes of shape."""
    taking = takers.get(node.output[0], [])
    if len(taking) != 1:
        return None
    bias = taking[0].op_type == "Add" and any(name in weights for name in taking[0].input)
    return _follows(taking[0], takers, weights) if bias or taking[0].op_type in RESHAPES else taking[0].op_type
