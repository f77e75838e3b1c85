"""Where a benchmark runs and in which numbers: the options that all benchmarks share, and what follows from them."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.machine import PRECISIONS, check_device, set_precision
from wbmm.progress import progress_bar
from wbmm.text import first_line
from wbmm.timing import Timing, time_interleaved

__all__ = ["CPU", "DTYPES", "Setting", "add_setting_arguments", "dtype_name"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def dtype_name(text: str) -> str:
    """A data type by its name in `DTYPES` or its short one, for argparse."""
    return SHORT.get(text, text)


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument(
        "--dtype",
        type=dtype_name,
        choices=DTYPES,
        default="float32",
        help="type of weights and images; bf16 and fp16 for short (default: float32)",
    )
    parser.add_argument(
        "--autocast", action="store_true", help="weights and images stay in float32; autocast computes in --dtype"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="tf32",
        help="of float32 on a GPU: " + "; ".join(f"{name}, {text}" for name, text in PRECISIONS.items()),
    )


@dataclass(frozen=True)
class Setting:
    """The shared options of one run.

    Attributes:
        device: e.g. `cpu` or `cuda:1`.
        dtype: one of `DTYPES`; the type of weights and images, or with `autocast` what autocast computes in.
        autocast: whether weights and images stay in float32.
        precision: how a GPU computes float32, one of `wbmm.machine.PRECISIONS`. A CPU takes no notice of it.
    """

    device: str = "cpu"
    dtype: str = "float32"
    autocast: bool = False
    precision: str = "tf32"

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "Setting":
        """The options, checked; the precision is set for this process."""
        setting = cls(args.device, args.dtype, args.autocast, args.precision)
        setting.apply()
        return setting

    def apply(self) -> None:
        """Sets the precision of this process; an error if the options cannot be used here."""
        if self.autocast and self.dtype == "float32":
            raise ValueError("--autocast needs a --dtype to compute in: bfloat16 or float16")
        check_device(self.device)
        set_precision(self.precision)

    @property
    def on_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def product_dtype(self) -> torch.dtype:
        """What matrices are multiplied in."""
        return DTYPES[self.dtype]

    def describe(self) -> str:
        """For the note under a table."""
        numbers = f"float32 weights under autocast to {self.dtype}" if self.autocast else f"{self.dtype} weights"
        effect = PRECISIONS[self.precision] if self.on_cuda else "without effect on a CPU"
        return f"{self.device}, {numbers}, precision {self.precision} ({effect})"

    def columns(self) -> dict[str, object]:
        """For a CSV."""
        return asdict(self)

    def argv(self) -> list[str]:
        """The options that differ from their defaults."""
        argv = []
        for name, value in asdict(self).items():
            if value != getattr(Setting, name):
                argv += [f"--{name}"] if value is True else [f"--{name}", value]
        return argv

    def place(self, item: nn.Module | Tensor, layout: torch.memory_format = torch.channels_last) -> nn.Module | Tensor:
        """A model or images on the device, in the type and memory format to compute with."""
        return item.to(
            device=self.device, dtype=torch.float32 if self.autocast else DTYPES[self.dtype], memory_format=layout
        )

    def autocasting(self) -> AbstractContextManager:
        """Autocast, where it is asked for. To be entered anew at each pass: it keeps converted weights."""
        return torch.autocast(torch.device(self.device).type, DTYPES[self.dtype]) if self.autocast else nullcontext()

    def forward(self, model: Callable[[Tensor], object], images: Tensor) -> object:
        """One forward pass."""
        with self.autocasting():
            return model(images)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Makes the device the current one. An operator that lacks the type ends in an error of one line."""
        try:
            with torch.cuda.device(self.device) if self.on_cuda else nullcontext():
                yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.dtype == "float32":
                raise
            raise ValueError(f"--dtype {self.dtype} does not work on {self.device}: {first_line(error)}") from error

    def time(
        self, calls: Mapping[object, Callable[[], object]], label: str, rounds: int, warmup: int = 2, pause: float = 0.0
    ) -> dict[object, Timing]:
        """`time_interleaved` on the device, with a progress bar called `label`."""
        with self.running(), progress_bar(warmup + rounds, label) as advance:
            return time_interleaved(calls, rounds, warmup, partial(advance, 1), pause, self.device)


CPU = Setting()
