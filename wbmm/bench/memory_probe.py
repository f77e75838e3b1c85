"""One measurement of memory, in a process of its own: prints the peak in bytes."""

import json
import re
import resource
import sys
from pathlib import Path

import timm
import torch

import wbmm
from wbmm.bench.forms import build, images_for
from wbmm.bench.train import TrainingStep


def resident() -> tuple[int, int]:
    """Bytes that this process holds now, and the most that it has held."""
    status = Path("/proc/self/status")
    if status.is_file():
        text = status.read_text()
        now, peak = (int(re.search(rf"{key}:\s+(\d+) kB", text)[1]) * 1024 for key in ("VmRSS", "VmHWM"))
        return now, peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
    return peak, peak


def measure(name: str, mode: str, size: tuple[int, int], batch: int, device: str) -> int:
    torch.nn.functional.conv2d(torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 3, 3))  # the libraries' own buffers
    before, _ = resident()
    images = torch.randn(batch, 3, *size, device=device)
    if mode == "step":
        step = TrainingStep(build(name, device, size), images_for(name, images))
        step()
        step()  # the first has made the optimiser's state, so that activations meet it here
        return _peak(device, before)
    model = timm.create_model(name, num_classes=0, global_pool="").to(device)
    if mode == "inference":
        model = wbmm.fuse(model.eval())
        with torch.inference_mode():
            model.forward_intermediates(images, intermediates_only=True)
    else:
        model.train().set_grad_checkpointing(mode == "checkpointing")
        maps = model.forward_intermediates(images, intermediates_only=True)
        sum(part.mean() for part in maps).backward()
    return _peak(device, before)


def _peak(device: str, before: int) -> int:
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident()[1] - before


if __name__ == "__main__":
    print(measure(**json.loads(sys.argv[1])))
