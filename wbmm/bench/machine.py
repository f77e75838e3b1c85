"""What figures were measured on, and with what, for every page of results."""

import platform
import re
from datetime import date
from pathlib import Path

import torch

from wbmm.deploy.card import versions

__all__ = ["machine_facts", "measured_line"]


def machine_facts(device: str = "cpu") -> dict[str, str]:
    """Device, threads, versions and date, as columns of a CSV."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _processor()
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
    threads = "" if facts["device"].startswith("cuda") else f"{facts['threads']} threads of "
    return f"Measured: {threads}{facts['machine']}, {facts['date']}; {found}."


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    return found.group(1) if found else platform.processor() or platform.machine()
