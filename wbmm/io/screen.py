"""What is refused in an ONNX or OpenVINO file before a runtime reads it: whatever reaches beyond the file."""

from pathlib import Path

from wbmm.models.state import CheckpointError

from .digest import mapped

__all__ = ["screen_onnx", "screen_openvino"]

MOST_XML = 1 << 28  # bytes; the weights are in the .bin
DEEPEST = 32  # graphs inside nodes inside graphs
# ONNX's messages, and which of their fields hold which messages: all the ways to a tensor.
_FIELDS = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        **{5: "TensorProto", 6: "GraphProto", 10: "TensorProto", 11: "GraphProto"},
        **{22: "SparseTensorProto", 23: "SparseTensorProto"},
    },
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
    "TensorProto": {},
}
_EXTERNAL, _LOCATION = 13, 14  # of a TensorProto: `external_data`, and `data_location`, which is 0 for the file itself


def screen_onnx(path: str | Path) -> None:
    """Raises if an ONNX file takes weights from other files, which may be any on the machine, or is not one at all."""
    try:
        with mapped(path) as data, memoryview(data) as view:
            external = _reaches_out(view, 0, len(view), "ModelProto", DEEPEST)
    except (IndexError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable ONNX file, perhaps truncated ({error})") from None
    if external:
        raise CheckpointError(
            f"{path}: refused, since it takes weights from other files; take one of `wbmm export`, which is whole"
        )


def _reaches_out(data: memoryview, start: int, end: int, message: str, depth: int) -> bool:
    """Whether a tensor in a message of protobuf's is stored elsewhere; a ValueError if it is no such message."""
    if not depth:
        raise ValueError("its graphs are nested too deep")
    inner = _FIELDS[message]
    while start < end:
        tag, start = _varint(data, start)
        field, kind = tag >> 3, tag & 7
        if kind == 0:
            value, start = _varint(data, start)
            if message == "TensorProto" and field == _LOCATION and value:
                return True
            continue
        if kind == 2:
            length, start = _varint(data, start)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of an unknown kind at byte {start}")
        if length > end - start:
            raise ValueError(f"a field that is longer than what it is in, at byte {start}")
        if message == "TensorProto" and field == _EXTERNAL:
            return True
        if kind == 2 and field in inner and _reaches_out(data, start, start + length, inner[field], depth - 1):
            return True
        start += length
    return False


def _varint(data: memoryview, start: int) -> tuple[int, int]:
    """A number of protobuf's, and where the next thing starts."""
    value = 0
    for place in range(10):
        byte = data[start + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, start + place + 1
    raise ValueError(f"a number without an end at byte {start}")


def screen_openvino(path: str | Path) -> None:
    """Raises if an .xml file is too large, or defines entities, which could stand for other files."""
    if Path(path).stat().st_size > MOST_XML:
        raise CheckpointError(
            f"{path}: refused, since it is larger than {MOST_XML >> 20} MB; its weights are in the .bin"
        )
    text = Path(path).read_bytes()
    if not text.lstrip().startswith((b"<?xml", b"<net")):
        raise CheckpointError(f"{path}: not a readable OpenVINO file, perhaps truncated (it is no XML)")
    if b"<!DOCTYPE" in text.upper() or b"<!ENTITY" in text.upper():
        raise CheckpointError(f"{path}: refused, since it defines entities; take one of `wbmm export`")
