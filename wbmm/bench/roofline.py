"""`wbmm bench roofline`: bytes and multiply-adds of a model, and the time that they take at a GPU's limits.

Everything here is computed, not measured. The model runs on the meta device, which needs no memory, once as the
reference computes it and once as the Triton backend would. Each operator that PyTorch issues and each kernel that the
backend launches counts once, reading its inputs and writing its outputs once. Its time is the larger of bytes over the
memory's speed and multiply-adds over the arithmetic units' speed. Real kernels are slower. The figures show what
bounds a step, and how much fused kernels can save.
"""

import argparse
import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import timm
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from wbmm.extras import is_installed
from wbmm.layers import Block, FusedBlock
from wbmm.models.fuse import fuse
from wbmm.models.wbmm import Downsample, Stem
from wbmm.ops.dispatch import REFERENCE, rehearse
from wbmm.text import render_table

from .operators import paper_figures

__all__ = ["GPUS", "Gpu", "Kernel", "by_operator", "issued", "parts", "record", "units"]

EXAMPLE = "wbmm bench roofline wbmm_t --gpu a100 --batch 128 --training"
BACKENDS = (REFERENCE, "triton")
BOTH = "both"
HEADERS = ("part", "kernels", "GB", "G multiply-adds", "ms", "share", "bound by")
BESIDE_HEADERS = ("part", "kernels: reference", "triton", "GB: reference", "triton", "ms: reference", "triton")
BESIDE_HEADERS += ("bytes", "time")
PAPER_HEADERS = ("operator", "map", "batch", "images/s (paper)", "GB/s", "share of the memory's speed", "TFLOP/s")
PAPER_CHANNELS, PAPER_GPU = 256, "a800"


@dataclass(frozen=True)
class Gpu:
    """Limits by the maker's data sheet, dense: GB/s, and TFLOP/s in each precision."""

    name: str
    bandwidth: float
    tflops: dict[str, float]

    def seconds(self, bytes_: float, macs: float, precision: str) -> float:
        """The least time of one kernel."""
        return max(bytes_ / (self.bandwidth * 1e9), 2 * macs / (self.tflops[precision] * 1e12))


GPUS = {
    "a100": Gpu("A100 SXM 80 GB", 2039, {"ieee": 19.5, "tf32": 156, "bf16": 312}),
    "a800": Gpu("A800 SXM 80 GB", 2039, {"ieee": 19.5, "tf32": 156, "bf16": 312}),
    "h100": Gpu("H100 SXM", 3350, {"ieee": 67, "tf32": 494, "bf16": 989}),
    "l4": Gpu("L4", 300, {"ieee": 30.3, "tf32": 60, "bf16": 121}),
    "l40s": Gpu("L40S", 864, {"ieee": 91.6, "tf32": 183, "bf16": 362}),
    "a10": Gpu("A10", 600, {"ieee": 31.2, "tf32": 62.5, "bf16": 125}),
}


@dataclass(frozen=True)
class Kernel:
    """One operator as it was issued, and what it moves and computes."""

    operator: str
    bytes: int
    macs: int


class _Recorder(TorchDispatchMode):
    """Notes each operator that reads or writes memory."""

    # Make room or hand on what is there: no kernel runs.
    FREE = (
        "empty",
        "new_empty",
        "detach",
        "alias",
        "lift",
        "is_same_size",
        "_unsafe_view",
        "_reshape_alias",
        "squeeze_",
    )
    LIKE = ("new_", "zeros_like", "ones_like", "full_like")  # of their input these read shape and type alone

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "wbmm":  # its kernels were noted while it ran
            return out
        name = func._schema.name.removeprefix("aten::")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        written = [tensor for tensor in outputs if not _is_view(tensor, inputs)]
        if func._schema.is_mutable:
            written = outputs or inputs[:1]
        if written and not name.startswith(self.FREE):
            read = () if name.startswith(self.LIKE) else inputs
            self.kernels.append(Kernel(name, _moved(read, written), _macs(func, args, kwargs, out)))
        return out

    def launched(self, launch) -> None:
        self.kernels.append(Kernel(launch.kernel, _moved(launch.reads, launch.writes), launch.macs))


def _macs(func, args: tuple, kwargs: dict, out) -> int:
    if func._overloadpacket is torch.ops.aten.convolution_backward:  # PyTorch's formula passes over the groups
        grad, weight, mask = args[0], args[2], args[10]
        return grad.numel() * weight[0].numel() * sum(mask[:2])
    count = flop_registry.get(func._overloadpacket)
    return count(*args, **kwargs, out_val=out) // 2 if count else 0


def _is_view(tensor: Tensor, inputs: Iterable[Tensor]) -> bool:
    storage = tensor.untyped_storage()._cdata
    return any(other.untyped_storage()._cdata == storage for other in inputs)


def _moved(read: Iterable[Tensor], written: Iterable[Tensor]) -> int:
    return sum(map(_bytes, _distinct(read))) + sum(map(_bytes, _distinct(written)))


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each piece of memory once: `x * x` reads x once."""
    return list({(t.untyped_storage()._cdata, t.storage_offset(), t.shape): t for t in tensors}.values())


def _bytes(tensor: Tensor) -> int:
    """What is really stored: a dimension of stride 0 is one row that is read again from the cache."""
    count = 1
    for side, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= 1 if stride == 0 and side else side
    return count * tensor.element_size()


@contextmanager
def _as_issued_by(backend: str, recorder: _Recorder) -> Iterator[None]:
    with rehearse(backend):
        if backend == REFERENCE:
            yield
            return
        from wbmm.ops.backends.triton.launch import listen

        with listen(recorder.launched):
            yield


def record(module: nn.Module, x: Tensor, training: bool = False, backend: str = REFERENCE) -> list[Kernel]:
    """The kernels of a forward pass or, with `training`, of forward and backward.

    Args:
        module: on the meta device, as is `x`.
        training: gradients of the input and of all parameters are computed.
        backend: who computes the operators: one of `BACKENDS`.
    """
    module.train(training)
    recorder = _Recorder()
    with _as_issued_by(backend, recorder):
        with torch.no_grad():
            module(x)  # what is made once and kept is made here
        recorder.kernels.clear()
        with recorder, torch.set_grad_enabled(training):
            out = module(x.requires_grad_(training))
            if training:
                out.backward(torch.empty_like(out))
    module.zero_grad()  # or the next pass would add to these gradients
    return recorder.kernels


@dataclass(frozen=True)
class Unit:
    """A part of a model that is computed as a whole: where it is, the part itself, the shape of its input."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]


def units(model: nn.Module, images: Tensor) -> list[Unit]:
    """Stem, downsampling layers, blocks and head of a model of the family, in order; any other model as one unit."""
    kinds = (Stem, Downsample, Block, FusedBlock)
    found: list[Unit] = []
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            note = partial(_note, found, name)
            handles.append(module.register_forward_pre_hook(note))
    with torch.no_grad():
        model.eval()(images)
    for handle in handles:
        handle.remove()
    return found or [Unit("whole model", model, tuple(images.shape))]


def _note(found: list[Unit], name: str, module: nn.Module, args: tuple[Tensor]) -> None:
    found.append(Unit(name, module, tuple(args[0].shape)))


@dataclass
class Part:
    """Units of one kind and shape, summed."""

    label: str
    count: int = 0
    kernels: int = 0
    bytes: int = 0
    macs: int = 0
    seconds: float = 0.0
    bound: Counter = field(default_factory=Counter)

    def add(self, kernels: list[Kernel], gpu: Gpu, precision: str) -> None:
        self.count += 1
        for kernel in kernels:
            seconds = gpu.seconds(kernel.bytes, kernel.macs, precision)
            memory = gpu.seconds(kernel.bytes, 0, precision)
            self.kernels += 1
            self.bytes += kernel.bytes
            self.macs += kernel.macs
            self.seconds += seconds
            self.bound["memory" if memory >= seconds else "arithmetic"] += seconds

    def row(self, whole: float) -> list[str]:
        bound = ", ".join(f"{name} {part / self.seconds:.0%}" for name, part in self.bound.most_common())
        values = f"{self.bytes / 1e9:.2f}", f"{self.macs / 1e9:.1f}", f"{self.seconds * 1e3:.3f}"
        return [self.name, str(self.kernels), *values, f"{self.seconds / whole:.0%}", bound]

    @property
    def name(self) -> str:
        return f"{self.count} x {self.label}" if self.count > 1 and self.label != "all" else self.label

    def row_beside(self, other: "Part") -> list[str]:
        """This part as the reference issues it, beside the same as another backend does."""
        pairs = [(str(part.kernels), f"{part.bytes / 1e9:.2f}", f"{part.seconds * 1e3:.3f}") for part in (self, other)]
        figures = [value for pair in zip(*pairs, strict=True) for value in pair]
        return [self.name, *figures, f"{self.bytes / other.bytes:.1f}x", f"{self.seconds / other.seconds:.1f}x"]


def issued(
    model: nn.Module, images: Tensor, training: bool, backend: str = REFERENCE
) -> list[tuple[str, list[Kernel]]]:
    """What each unit of a model is, and its kernels."""
    memo: dict[str, list[Kernel]] = {}
    found = []
    for unit in units(model, images):
        label = _label(unit)
        if label not in memo:
            x = torch.empty(unit.shape, dtype=images.dtype, device="meta", memory_format=torch.channels_last)
            memo[label] = record(unit.module, x, training, backend)
        found.append((label, memo[label]))
    return found


def parts(kernels: list[tuple[str, list[Kernel]]], gpu: Gpu, precision: str) -> list[Part]:
    """What kernels cost at a GPU's limits, those of one label together; the last part is the sum."""
    found: dict[str, Part] = {}
    whole = Part("all")
    for label, some in kernels:
        for part in (found.setdefault(label, Part(label)), whole):
            part.add(some, gpu, precision)
    return [*found.values(), whole]


def by_operator(kernels: list[tuple[str, list[Kernel]]]) -> list[tuple[str, list[Kernel]]]:
    """The same kernels under their own names, the most bytes first."""
    found: dict[str, list[Kernel]] = {}
    for _, some in kernels:
        for kernel in some:
            found.setdefault(kernel.operator, []).append(kernel)
    return sorted(found.items(), key=lambda item: -sum(kernel.bytes for kernel in item[1]))


def _label(unit: Unit) -> str:
    where = "x".join(map(str, unit.shape[1:]))
    if not isinstance(unit.module, Block | FusedBlock):
        return f"{type(unit.module).__name__}, {where}"
    return f"block with {type(unit.module.mixer).__name__}, {where}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="wbmm_t", help="timm name (default: wbmm_t)")
    parser.add_argument("--gpu", choices=GPUS, default="a100")
    parser.add_argument("--precision", choices=("ieee", "tf32", "bf16"), default="tf32")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, nargs=2, default=(224, 224), metavar=("H", "W"))
    parser.add_argument("--training", action="store_true", help="forward and backward, in training form")
    parser.add_argument(
        "--backend",
        choices=(BOTH, *BACKENDS),
        default=BOTH if is_installed("triton") else REFERENCE,
        help="one in detail, or both side by side (the default)",
    )
    parser.add_argument("--kernels", action="store_true", help="kernel by kernel, not part by part; of one backend")
    parser.add_argument("--paper", action="store_true", help="read the paper's A800 operator table against the limits")
    parser.add_argument(
        "--measured",
        type=Path,
        nargs="+",
        metavar="CSV",
        help="files that `bench model` and `bench train` wrote: their figures beside the limits of --gpu",
    )
    parser.add_argument("--markdown", action="store_true")


def run(args: argparse.Namespace) -> int:
    if args.paper:
        print(render_table(PAPER_HEADERS, paper_rows(args.batch), markdown=args.markdown))
        print(
            f"\nThe paper's images/s on an A800, {PAPER_CHANNELS} channels, float32. GB/s: x read once and y written "
            "once; TFLOP/s: of all taps or of the product. Computed from the paper's figures, not measured here."
        )
        return 0
    if args.measured:
        return _compare(args)
    _check(args)
    gpu, size = GPUS[args.gpu], tuple(args.size)
    chosen = BACKENDS if args.backend == BOTH else (args.backend,)
    kernels = count(args.model, args.batch, size, args.precision, args.training, not args.training, chosen)
    if len(chosen) > 1 and kernels[0] == kernels[1]:
        print(f"{args.model} has no operators that the backend triton computes\n")
        chosen, kernels = chosen[:1], kernels[:1]
    if args.kernels:
        kernels = [[(name, [kernel]) for name, some in by_operator(one) for kernel in some] for one in kernels]
    found = [parts(one, gpu, args.precision) for one in kernels]
    most = [args.batch / some[-1].seconds for some in found]
    if len(found) == 1:
        rows, headers = [part.row(found[0][-1].seconds) for part in found[0]], HEADERS
    else:
        rows, headers = [one.row_beside(other) for one, other in zip(*found, strict=True)], BESIDE_HEADERS
    print(render_table(headers, rows, markdown=args.markdown))
    what = "forward and backward" if args.training else "forward, fused form"
    print(
        f"\nComputed, not measured: {args.model}, {what}, batch {args.batch}, {args.size[0]}x{args.size[1]}, "
        f"{args.precision}, on {gpu.name} ({gpu.bandwidth:g} GB/s, {gpu.tflops[args.precision]:g} TFLOP/s); each "
        "kernel reads and writes once, at the limit. At most "
        + " and ".join(f"{speed:.0f} images/s ({name})" for speed, name in zip(most, chosen, strict=True))
        + "."
    )
    return 0


def count(
    name: str, batch: int, size: tuple[int, int], precision: str, training: bool, fused: bool, backends: Iterable[str]
) -> list[list[tuple[str, list[Kernel]]]]:
    """What `issued` gives of a model by name, for each backend."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = timm.create_model(name, device=torch.device("meta"), dtype=dtype).eval()
    model = (fuse(model) if fused else model).to(memory_format=torch.channels_last)  # as it is trained and run
    images = torch.empty(batch, 3, *size, dtype=dtype, device="meta", memory_format=torch.channels_last)
    return [issued(model, images, training, backend) for backend in backends]


def _compare(args: argparse.Namespace) -> int:
    """What was measured, beside the limits."""
    gpu, rows = GPUS[args.gpu], []
    backends = BACKENDS if is_installed("triton") else BACKENDS[:1]
    for path in args.measured:
        if not path.is_file():
            raise ValueError(f"--measured {path}: there is no such file; `wbmm bench model --out DIR` writes one")
        with open(path, encoding="utf-8") as file:
            records = list(csv.DictReader(file))
        if any(record.get("bench") not in ("model", "train") for record in records):
            raise ValueError(f"--measured {path}: expected the CSV file of `wbmm bench model` or `wbmm bench train`")
        for record in records:
            rows.append([path.parent.name, *_beside_limits(record, gpu, backends)])
    headers = ("of", "model", "bench", "batch", "images/s", *(f"at most: {name}" for name in backends))
    print(render_table((*headers, "share of the last"), rows, markdown=args.markdown))
    print(f"\nimages/s: measured. At most: computed, not measured, on {gpu.name}; a step without its optimiser.")
    return 0


def _beside_limits(record: dict[str, str], gpu: Gpu, backends: Iterable[str]) -> list[str]:
    name, _, form = record["model"].partition(":")
    size, batch, training = (
        (int(record["height"]), int(record["width"])),
        int(record["batch"]),
        record["bench"] == "train",
    )
    precision = record["precision"] if record["dtype"] == "float32" else "bf16"
    counted = count(name, batch, size, precision, training, form == "compact", backends)
    most = [batch / parts(kernels, gpu, precision)[-1].seconds for kernels in counted]
    speed = float(record["images_per_s"])
    limits = (f"{value:.0f}" for value in most)
    return [record["model"], record["bench"], str(batch), f"{speed:.0f}", *limits, f"{speed / most[-1]:.0%}"]


def _check(args: argparse.Namespace) -> None:
    if min(args.batch, *args.size) < 1:
        raise ValueError(f"--batch {args.batch}, --size {tuple(args.size)}: each must be at least 1")
    if not timm.is_model(args.model):
        raise ValueError(f"timm knows no model {args.model!r}; see `wbmm list` and timm.list_models()")
    if args.backend != REFERENCE and not is_installed("triton"):
        raise ValueError(f"--backend {args.backend}: the package triton is missing; use --backend {REFERENCE}")
    if args.kernels and args.backend == BOTH:
        raise ValueError(f"--kernels is of one backend: add --backend {' or --backend '.join(BACKENDS)}")


def paper_rows(batch: int) -> list[list[str]]:
    """The paper's operator table at one batch size, as GB/s and TFLOP/s."""
    paper = paper_figures()
    batches = sorted({key[2] for key in paper})
    if batch not in batches:
        raise ValueError(f"--batch {batch}: the paper has {', '.join(map(str, batches))}")
    gpu, result = GPUS[PAPER_GPU], []
    for (method, size, at, side), speed in paper.items():
        if at != batch:
            continue
        values = speed * PAPER_CHANNELS * side * side
        bandwidth, tflops = values * 2 * 4 / 1e9, values * 2 * size * size / 1e12
        figures = f"{speed:.0f}", f"{bandwidth:.0f}", f"{bandwidth / gpu.bandwidth:.0%}", f"{tflops:.1f}"
        result.append([f"{method} {size}x{size}", f"{side}x{side}", str(batch), *figures])
    return result
