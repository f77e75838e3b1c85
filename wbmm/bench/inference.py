"""`wbmm bench model`: inference speed of whole models beside a baseline, and their share of the machine's limit.

`--preset paper` is the paper's table of inference on a GPU and a CPU: WBMM against UniRepLKNet with and without its
large-kernel package, both in the reference implementation and both in ours. `--preset edge` is its table of an edge
device: half precision on a GPU, INT8 on a CPU, through the runtimes that are installed.
"""

import argparse
from functools import lru_cache, partial

import torch
import torch.nn as nn

from . import edge
from .limit import count_gmacs, limit, product_calls
from .results import Entry, Record, Result
from .setting import FORMS, Setting, build, images_for
from .speed import Contest, Job, add_paper_figures, add_speed_arguments, check_numbers, contests, run_speed, time_each

EXAMPLE = "wbmm bench model --preset paper --quick --out results/cpu"
DEFAULT = (
    "wbmm_t:compact",
    "wbmm_t:dense",
    "wbmm_t:plain",
    "unireplknet_t:compact",
    "unireplknet_t:plain",
    "convnext_tiny",
    "convnextv2_tiny",
    "swin_tiny_patch4_window7_224",
    "inception_next_tiny",
)
PAIR = ("plain", "compact")
PAPER_PX = (224, 512, 1024)
BATCHES = {"cpu": [1, 4, 16], "cuda": [128]}
NOTE = (
    "channels-last, contiguous for the reference implementation unless a layout is said; ratios to the model of the "
    "column *ratio to* in the same interleaved run."
)
PRESET_NOTE = (
    " `:plain` is the reference implementation, which the paper's figures are to be compared with; `:compact` is the "
    "same net with every fast path of this package, on both sides. On a CPU windows then run as depthwise convolutions."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_speed_arguments(parser, DEFAULT, tuple(FORMS), ("paper", "edge"))
    parser.add_argument(
        "--limit", action="store_true", help="measure matrix products in the same run, and each model's share of them"
    )
    edge.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_numbers(args)
    if args.preset == "edge":
        return edge.run(args, add_arguments)
    on_cuda = torch.device(args.device).type == "cuda"
    groups = contests(args, DEFAULT, tuple(FORMS), PAIR)
    batches = args.batch or (BATCHES["cuda" if on_cuda else "cpu"] if args.preset else [1, 16])
    if args.preset and not args.px and not args.quick and tuple(args.size) == (224, 224):
        args.px = list(PAPER_PX)
    finish = partial(_finish, "A800" if on_cuda else "i7-13700K")
    note = NOTE + (PRESET_NOTE if args.preset else "")
    return run_speed(args, "model", groups, batches, measure, add_arguments, note, finish)


def _finish(machine: str, record: Record, contest: Contest, entry: Entry) -> None:
    add_paper_figures(record, contest, machine)
    products = entry.results.get("limit")
    if products is not None and "gmacs" in record:
        record["limit_gmacs_per_s"] = products["gmacs_per_s"]
        record["share"] = record["gmacs"] * record["images_per_s"] / products["gmacs_per_s"]


@lru_cache(maxsize=24)
def _model(spec: str, setting: Setting, size: tuple[int, int], layout: torch.memory_format) -> nn.Module:
    return build(spec, setting, size, layout)


def measure(job: Job) -> dict[str, Result]:
    """Interleaved forward passes; with `--limit`, matrix products among them."""
    setting, images = job.setting, torch.randn(job.batch, 3, *job.size)
    models: dict[str, nn.Module] = {}
    if job.args.compile:
        torch._dynamo.reset()  # or the second batch size would be compiled as a dynamic one

    def prepare(spec: str, layout: torch.memory_format):
        models[spec] = _model(spec, setting, job.size, layout)
        net = torch.compile(models[spec]) if job.args.compile else models[spec]
        return partial(setting.forward, net, images_for(spec, images, setting, layout))

    def products():
        return product_calls(models.values(), job.batch, job.size, setting) if job.args.limit else {}

    with torch.inference_mode():
        found, timings = time_each(job, prepare, extra=products)
    for spec, model in models.items():
        if "seconds" in found.get(spec, {}):
            found[spec]["gmacs"] = count_gmacs(model, job.size)
    if timings:
        speed, shape = limit(timings)
        found["limit"] = {"gmacs_per_s": speed / 1e9, "shape": list(shape)}
    return found
