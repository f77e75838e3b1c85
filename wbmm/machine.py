"""The machine: what figures were measured on, where things run, and no reports to anybody about it."""

import platform
import re
import sys
from datetime import date
from importlib import metadata
from pathlib import Path

import torch

from wbmm.text import first_line
from wbmm.version import __version__

__all__ = [
    "PRECISIONS",
    "available_memory",
    "check_device",
    "machine_facts",
    "measured_line",
    "processor",
    "set_precision",
    "versions",
]


def machine_facts(device: str = "cpu") -> dict[str, str]:
    """Device, threads, versions and date, as columns of a CSV."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else processor()
    return {
        "device": device,
        "machine": name,
        "threads": str(torch.get_num_threads()),
        **versions(),
        "torch": torch.__version__,  # says the build as well
        "date": date.today().isoformat(),
    }


def measured_line(facts: dict[str, str]) -> str:
    """One sentence from `machine_facts`."""
    found = ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "timm", "wbmm") if name in facts)
    threads = f"{facts['threads']} thread{'' if str(facts['threads']) == '1' else 's'} of "
    where = facts["machine"] if facts["device"].startswith("cuda") else threads + facts["machine"]
    return f"Measured: {where}, {facts['date']}; {found}."


def processor() -> str:
    """The name of the CPU."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    return found.group(1) if found else platform.processor() or platform.machine()


def check_device(device: str) -> None:
    """Raises unless tensors can be made there."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device} cannot be used here: {first_line(error)}") from None


PRECISIONS = {
    "tf32": "products and convolutions in TF32, as in the paper",
    "ieee": "strict float32",
    "bf16": "products and convolutions may be rounded to bfloat16 on a CPU with AMX, sums in float32; on a GPU as tf32",
}


def set_precision(precision: str) -> None:
    """How float32 matrices are multiplied and float32 maps convolved, in this process.

    By default PyTorch convolves in TF32 and multiplies in strict float32, at an eighth of the speed on an A100.

    Args:
        precision: one of `PRECISIONS`.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r}: expected one of {', '.join(PRECISIONS)}")
    # Not by `fp32_precision`, PyTorch's newer switch, where there is an older one: who reads that one afterwards, as
    # libraries do, gets an error.
    torch.set_float32_matmul_precision("medium" if precision == "bf16" else "highest")
    if precision == "tf32":  # not "high", which means the CPU as well
        torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = precision != "ieee"
    torch.backends.mkldnn.conv.fp32_precision = "bf16" if precision == "bf16" else "none"


def describe_precision(precision: str, device: torch.device | str) -> str:
    """What a precision does on a device, for the first lines of a run."""
    on_cpu = torch.device(device).type == "cpu"
    return "without effect on a CPU" if on_cpu and precision != "bf16" else PRECISIONS[precision]


def versions(*packages: str) -> dict[str, str]:
    """Versions of this package, Python, torch, timm and `packages`, as far as they are installed."""
    found = {"wbmm": __version__, "python": platform.python_version()}
    for name in ("torch", "timm", *packages):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def available_memory(device: torch.device | None = None) -> int:
    """Bytes that can be taken, on a CPU without swapping; no limit where the system does not tell."""
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text()) if info.is_file() else None
    return int(found[1]) * 1024 if found else sys.maxsize
