"""OpenVINO files: an .xml and the .bin beside it, made from an ONNX one."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wbmm.deploy.atomic import atomic_path
from wbmm.deploy.card import METADATA_KEY, ModelCard
from wbmm.deploy.runtime import need
from wbmm.io.digest import DIGEST_KEY, EMPTY, seal

__all__ = ["atomic_pair", "convert", "save"]


def convert(converted):
    """The `openvino.Model` of a `torch.onnx.ONNXProgram`."""
    openvino = need("openvino")
    return openvino.convert_model(io.BytesIO(converted.model_proto.SerializeToString()))


def save(model, card: ModelCard, path: Path, half: bool = False) -> None:
    """Writes `path` (.xml) and the .bin beside it."""
    model.set_rt_info(card.to_json(), [METADATA_KEY])
    model.set_rt_info(EMPTY, [DIGEST_KEY])
    need("openvino").save_model(model, path, compress_to_fp16=half)
    seal(path)


@contextmanager
def atomic_pair(path: Path, force: bool = False) -> Iterator[Path]:
    """`atomic_path` for an .xml whose .bin is written beside it: the .bin takes its name first, or neither does."""
    weights = path.with_suffix(".bin")
    placed = False
    try:
        with atomic_path(path, force) as temporary:
            written = temporary.with_suffix(".bin")
            try:
                with atomic_path(weights, force) as temporary_weights:
                    yield temporary
                    os.replace(written, temporary_weights)
                placed = True
            finally:
                written.unlink(missing_ok=True)
    except BaseException:
        if placed:  # an .xml must never meet weights that are not its own
            weights.unlink(missing_ok=True)
        raise
