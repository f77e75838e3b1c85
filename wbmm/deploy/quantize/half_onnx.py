"""An ONNX model in fp16, with what would overflow there left in float32."""

__all__ = ["to_half"]

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
