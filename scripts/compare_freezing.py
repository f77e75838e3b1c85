"""What the private oneDNN calls give over PyTorch's public way: `torch.compile` with frozen weights on the reference.

    python scripts/compare_freezing.py
    python scripts/compare_freezing.py --models wbmm_t --batches 1 --rounds 30

Each model is fused. Four candidates run in turn, in one process: eager execution with the `onednn` backend, the
reference in eager execution, the model compiled as users compile it (`wbmm/ops/compiled.py`), and the reference
compiled; both with `torch._inductor.config.freezing`, which packs the weights for oneDNN as well.
Printed are medians in milliseconds and their ratio to the first. Outputs are compared before.
"""

import argparse
import copy
from collections.abc import Callable

import timm
import torch
import torch._inductor.config
from torch import Tensor

import wbmm
from wbmm.ops import use_backend
from wbmm.timing import time_interleaved

TOLERANCE = 1e-3  # of logits, relative to the largest


def candidates(name: str, batch: int, size: int) -> dict[str, Callable[[], Tensor]]:
    """The ways to run one fused model on one batch, each checked against the reference."""
    torch.manual_seed(0)
    model = wbmm.fuse(timm.create_model(name).eval())
    x = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    definition = torch.compile(copy.deepcopy(model), fullgraph=True, dynamic=False)

    def run_on(backend: str, net: Callable[[Tensor], Tensor]) -> Tensor:
        with use_backend(backend):
            return net(x)

    ways = {
        "onednn": lambda: run_on("onednn", model),
        "reference": lambda: run_on("reference", model),
        "compiled": lambda: compiled(x),
        "compiled reference": lambda: run_on("reference", definition),
    }
    expected = ways["reference"]()
    for way, call in ways.items():
        error = ((call() - expected).abs().max() / expected.abs().max()).item()
        if not error < TOLERANCE:
            raise ValueError(f"{name}, batch {batch}: {way} differs from the reference by {error:.1e} of the largest")
    return ways


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["wbmm_a", "wbmm_t"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch._inductor.config.freezing = True
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {args.rounds} rounds")
    print(f"{'model':12} {'batch':>5} {'way':18} {'ms':>9} {'ratio':>6}")
    for name in args.models:
        for batch in args.batches:
            timings = time_interleaved(candidates(name, batch, args.size), rounds=args.rounds)
            for way, timing in timings.items():
                ratio = timing.median / timings["onednn"].median
                print(f"{name:12} {batch:5} {way:18} {timing.median * 1e3:9.2f} {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
