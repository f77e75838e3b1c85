"""One way to run a model file, whatever it is: a checkpoint, ONNX, OpenVINO or torch.export."""

import difflib
import importlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import timm
import torch
import torch.nn as nn
from torch import Tensor

from wbmm.io.card import ModelCard, as_asked, card_of, form_of
from wbmm.io.digest import verify_digest
from wbmm.io.files import SUFFIXES, load_model
from wbmm.io.reader import METADATA_KEY
from wbmm.io.screen import screen_onnx, screen_openvino
from wbmm.machine import silence_telemetry
from wbmm.models.state import CheckpointError
from wbmm.text import printable

__all__ = [
    "EXPORTED",
    "Runner",
    "load_program",
    "need",
    "onnx_session",
    "open_runner",
    "openvino_model",
    "read_openvino",
    "torch_runner",
]

Outputs = Tensor | list[Tensor]
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

    def __call__(self, images: Tensor) -> Outputs:
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
            raise ValueError(f"{self.name} failed on images of shape {shape}: {_last_line(error)}") from error
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


def need(package: str) -> ModuleType:
    """A package of the extra `export`, or an error that names it."""
    silence_telemetry()
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(f"this needs the package {package}: in the checkout, pip install '.[export]'") from None


def torch_runner(model: nn.Module, card: ModelCard | None = None, device: str = "cpu") -> Runner:
    """A PyTorch model as a runner."""
    card = card or card_of(model)
    model = model.to(device).eval()
    features = card.kind == "features"

    @torch.inference_mode()
    def forward(images: Tensor) -> Sequence[Tensor]:
        images = images.to(device)
        outputs = model.forward_intermediates(images, intermediates_only=True) if features else (model(images),)
        return [output.float().cpu() for output in outputs]

    return Runner(f"PyTorch, {form_of(model)}", card, forward, net=model)


def onnx_session(path: str | Path, device: str = "cpu", threads: int | None = None):
    """An ONNX Runtime session on `cpu` or `cuda`, with PyTorch's number of threads."""
    runtime = need("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 4  # errors come as exceptions
    runtime.disable_telemetry_events()
    provider = "CUDAExecutionProvider" if device.startswith("cuda") else "CPUExecutionProvider"
    if provider not in runtime.get_available_providers():
        raise ValueError(
            f"device {device!r}: this onnxruntime has no {provider}; for NVIDIA, pip install onnxruntime-gpu"
        )
    path = _existing(path)
    verify_digest(path)
    screen_onnx(path)
    try:
        return runtime.InferenceSession(path, options, providers=[provider])
    except Exception as error:  # onnxruntime's classes share no base
        raise _unreadable(path, "ONNX", error) from None


def _open_onnx(path: Path, device: str) -> Runner:
    session = onnx_session(path, device)
    card = _parse_card(path, session.get_modelmeta().custom_metadata_map.get(METADATA_KEY))
    images = [(image.name, image.shape) for image in session.get_inputs()]
    batch, size = _sides(path, card, [[side if isinstance(side, int) else None for side in s] for _, s in images])
    name = images[0][0]

    def forward(images: Tensor) -> Sequence[Tensor]:
        return [torch.from_numpy(output) for output in session.run(None, {name: images.numpy()})]

    return Runner("ONNX Runtime", card, forward, batch, size)


def _core():
    return _core_of(need("openvino"))


@cache
def _core_of(openvino: ModuleType):
    """OpenVINO's `Core`, one for the process.

    Each of them sets the stack that signals are handled on, and a later one restores that of an earlier one when it
    goes, whether that is still there or not: then the next signal, such as the end of a worker of a data loader, kills
    the process.
    """
    return openvino.Core()


def read_openvino(path: str | Path):
    """The `openvino.Model` of an .xml file."""
    core = _core()
    path = _existing(path)
    if not Path(path).with_suffix(".bin").is_file():
        raise CheckpointError(f"{path}: the weights are missing, {Path(path).with_suffix('.bin').name} beside it")
    verify_digest(path)
    screen_openvino(path)
    try:
        return core.read_model(path)
    except Exception as error:
        raise _unreadable(path, "OpenVINO", error) from None


def openvino_model(
    source, threads: int | None = None, precision: str = "f32", hint: str = "LATENCY", count: bool = False
):
    """A compiled OpenVINO model on the CPU.

    Args:
        source: an .xml file, or an `openvino.Model`.
        threads: PyTorch's number, if not given.
        precision: what it computes in, `f32` or `bf16`; INT8 layers stay what they are.
        hint: `LATENCY` for one request at a time, `THROUGHPUT` for several.
        count: measure the time of each node.
    """
    core = _core()
    model = read_openvino(source) if isinstance(source, (str, Path)) else source
    options = {
        "INFERENCE_NUM_THREADS": threads or torch.get_num_threads(),
        "PERFORMANCE_HINT": hint,
        "INFERENCE_PRECISION_HINT": precision,
        "PERF_COUNT": count,
    }
    try:
        return core.compile_model(model, "CPU", options)
    except Exception as error:
        raise _unreadable(source if isinstance(source, (str, Path)) else "the model", "OpenVINO", error) from None


def _open_openvino(path: Path, device: str) -> Runner:
    if device != "cpu":
        raise ValueError(f"device {device!r}: OpenVINO files run on the CPU here")
    model = read_openvino(path)
    text = model.get_rt_info([METADATA_KEY]).value if model.has_rt_info([METADATA_KEY]) else None
    card = _parse_card(path, text)
    shapes = [image.get_partial_shape() for image in model.inputs]
    batch, size = _sides(path, card, [[side.get_length() if side.is_static else None for side in s] for s in shapes])
    if batch in (None, 1):
        from .streams import Streams

        return Runner("OpenVINO", card, Streams(model), None, size)
    compiled = openvino_model(model)

    def forward(images: Tensor) -> Sequence[Tensor]:
        outputs = compiled([images.numpy()])
        return [torch.from_numpy(outputs[i].copy()) for i in range(len(outputs))]

    return Runner("OpenVINO", card, forward, batch, size)


def load_program(path: str | Path) -> tuple[torch.export.ExportedProgram, str | None]:
    """A program of `torch.export` and the text of its card; the file is checked first, since one could hold code."""
    from wbmm.deploy.export.quiet import quiet
    from wbmm.io.pt2 import check_archive

    contents = check_archive(_existing(path))
    extra = {f"{METADATA_KEY}.json": ""}
    try:
        with quiet():
            program = torch.export.load(contents, extra_files=extra)
    except Exception as error:
        raise _unreadable(path, "torch.export", error) from None
    return program, extra[f"{METADATA_KEY}.json"] or None


def _open_program(path: Path, device: str) -> Runner:
    from wbmm.io.pt2 import check_sizes

    program, text = load_program(path)
    card = _parse_card(path, text)
    if device != "cpu":
        program = torch.export.passes.move_to_device_pass(program, device)
    images = [node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    shapes = [[side if isinstance(side, int) else None for side in node.meta["val"].shape] for node in images]
    batch, size = _sides(path, card, shapes)
    check_sizes(program, path, card.input_size)
    module = program.module()

    @torch.inference_mode()
    def forward(images: Tensor) -> Sequence[Tensor]:
        outputs = module(images.to(device))
        return [output.cpu() for output in ([outputs] if isinstance(outputs, Tensor) else outputs)]

    return Runner("torch.export", card, forward, batch, size)


EXPORTED = {".onnx": _open_onnx, ".xml": _open_openvino, ".pt2": _open_program}


def open_runner(source: str | Path, device: str = "cpu", model: str | None = None, ema: bool = True) -> Runner:
    """Whatever can be run, ready to run.

    Args:
        source: an .onnx, .xml (OpenVINO) or .pt2 (torch.export) file of `wbmm export`, a checkpoint, or the name of a
            model with pretrained weights.
        device: `cpu` or `cuda`.
        model: the model's name, where a checkpoint does not tell.
        ema: a checkpoint's moving average, where it has one.
    """
    path = Path(source)
    if path.suffix in EXPORTED:
        runner = _open_exported(path, device)
        as_asked(runner.card, model, None)
        return runner
    if path.is_file():
        net = load_model(path, model, ema)
        return torch_runner(net, net.card, device)
    name = str(source)
    if timm.is_model(name.partition(".")[0]):
        return torch_runner(_pretrained(name), device=device)
    if path.suffix in SUFFIXES or len(path.parts) > 1:
        raise CheckpointError(f"{path}: there is no such file")
    near = difflib.get_close_matches(name, timm.list_models(), n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise CheckpointError(f"{name}: neither a file nor a model that timm knows{hint}")


def _open_exported(path: Path, device: str) -> Runner:
    try:
        return EXPORTED[path.suffix](path, device)
    except ValueError:
        raise
    except Exception as error:  # a file that is odd in a way nobody thought of
        raise _unreadable(path, path.suffix, error) from error


def _pretrained(name: str) -> nn.Module:
    try:
        return timm.create_model(name, pretrained=True)
    except Exception as error:  # no weights known, no network, a hub's own errors
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{name}: its pretrained weights cannot be had ({reason}); give a file") from None


def _existing(path: str | Path) -> str:
    if not Path(path).is_file():
        raise CheckpointError(f"{path}: there is no such file")
    return str(path)


def _sides(path: Path, card: ModelCard, inputs: list[list[int | None]]) -> tuple[int | None, tuple[int, int] | None]:
    """The batch size and the image size of a file, None where any will do, from the shapes of its inputs."""
    if len(inputs) != 1 or len(inputs[0]) != 4 or inputs[0][1] not in (None, card.input_size[0]):
        shapes = ", ".join(str(shape) for shape in inputs) or "none"
        raise CheckpointError(
            f"{path}: its inputs are of shape {printable(shapes)}; expected one, "
            f"[batch, {card.input_size[0]}, height, width]"
        )
    batch, _, *size = inputs[0]
    return batch, None if None in size else tuple(size)


def _parse_card(path: Path, text: str | None) -> ModelCard:
    if not text:
        raise CheckpointError(
            f"{path}: the file does not say what it is (no metadata {METADATA_KEY!r}): write it with `wbmm export`"
        )
    try:
        return ModelCard.from_json(text)
    except Exception as error:  # not JSON, or JSON of something else
        raise CheckpointError(f"{path}: {_last_line(error)}") from None


def _unreadable(path: str | Path, kind: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: not a readable {kind} file, perhaps truncated ({_last_line(error)})")


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return printable(lines[-1])
