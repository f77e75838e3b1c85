"""`wbmm info`: one model, stage by stage."""

import argparse
import difflib
from collections import Counter

import timm
import torch

from wbmm.models.costs import build_on_meta, count_macs, count_params, receptive_fields
from wbmm.models.fuse import fuse
from wbmm.ops import dispatch
from wbmm.text import render_table
from wbmm.zoo import load_zoo

EXAMPLE = "wbmm info wbmm_t_hier --size 512 512"
HEADERS = ("stage", "blocks", "window", "map", "channels", "params M", "FLOPs G", "receptive field")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a name from `wbmm list`")
    parser.add_argument("--size", type=int, nargs=2, default=(224, 224), metavar=("H", "W"), help="input size")
    parser.add_argument(
        "--backends", action="store_true", help="who computes each operator on this device, and why not the others"
    )


def check_name(name: str) -> str:
    """A name of the zoo, or an error with the nearest ones."""
    if name not in load_zoo():
        near = difflib.get_close_matches(name, load_zoo(), n=3, cutoff=0.4)
        raise ValueError(
            f"unknown model {name!r}; " + (f"did you mean {', '.join(near)}?" if near else "see `wbmm list`")
        )
    return name


def run(args: argparse.Namespace) -> int:
    model = load_zoo()[check_name(args.model)]
    height, width = args.size
    if min(args.size) < 1:
        raise ValueError(f"--size {height} {width}: both sides must be at least 1")
    net = build_on_meta(model.name)
    macs = count_macs(net, (height, width))
    seen = receptive_fields((height, width), net.patterns, net.windows, net.mixer)
    fields = ["x".join(map(str, field)) for field in seen]
    halve = lambda n: (n + 1) // 2  # noqa: E731  a convolution with stride 2 and padding 1
    side = (halve(halve(height)), halve(halve(width)))
    table = [_row("stem", "", "", side, model.dims[0], net.stem, macs["stem"], fields[0])]
    for i, stage in enumerate(net.stages):
        side = (halve(side[0]), halve(side[1])) if i else side
        window = "-" if set(net.patterns[i]) == {"D"} else str(net.windows[i]) if net.mixer == "wbmm" else net.mixer
        table.append(
            _row(str(i + 1), model.pattern[i], window, side, model.dims[i], stage, macs[f"stages.{i}"], fields[i + 1])
        )
    table.append(_row("head", "", "", (1, 1), net.num_classes, net.head, macs["head"], ""))
    print(f"{model.name}: {model.task}, {height}x{width} input\n")
    print(render_table(HEADERS, table))
    params = count_params(net)
    print(f"\ntotal: {params / 1e6:.2f} M parameters, {macs[''] / 1e9:.2f} G multiply-adds (training form)")
    if model.paper:
        print("paper: {params} M, {flops} G, {top1} % ({table})".format(**model.paper))
    for tag, source in model.weights.items():
        where = f"{source['hub']}/{source['file']}" if "hub" in source else source["local"]
        print(f"weights: {model.name}.{tag}: {where} (timm.create_model(..., pretrained=True))")
    print(
        "receptive field: largest extent in input pixels through convolutions and windows; SE and GRN see the whole map"
    )
    if args.backends:
        print("\n" + describe_backends(model.name, args.size))
    return 0


def describe_backends(name: str, size: tuple[int, int]) -> str:
    """Who computes the operators of each block here, fused in inference and in training: two images are run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = timm.create_model(name, device=device)
    rows, reasons = [], {}
    for mode, net in (("inference", fuse(trained.eval())), ("training", trained)):
        net.train(mode == "training")
        choices = watch_choices(net, torch.zeros(2, 3, *size, device=device), grad=mode == "training")
        for (part, operator, backend, refusals), count in choices.items():
            rows.append([mode, part, operator, backend, str(count)])
            for other, why in refusals:
                reasons.setdefault((other, operator, mode), {})[why] = None
    lines = [f"{other}, {operator} in {mode}: {'; '.join(why)}" for (other, operator, mode), why in reasons.items()]
    table = render_table(("mode", "part", "operator", "backend", "calls"), rows)
    return "\n".join(
        [f"backends on {device}, batch 2 at {size[0]}x{size[1]}:", "", table, "", "why not the others:", *lines]
    )


def watch_choices(net, images, grad: bool) -> dict[tuple, int]:
    """(part of the net, operator, backend, reasons of the others) to the number of calls of one run."""
    choices, where = Counter(), ["stem"]
    for i, stage in enumerate(net.stages):
        stage.register_forward_pre_hook(lambda *args, i=i: where.__setitem__(0, f"stage {i + 1}"))
        for letter, block in zip(net.patterns[i], stage.blocks, strict=True):
            part = f"stage {i + 1}, {letter} blocks"
            block.register_forward_pre_hook(lambda *args, part=part: where.__setitem__(0, part))

    def note(operator: str, backend: str, reasons: dict[str, str]) -> None:
        choices[where[0], operator, backend, tuple(reasons.items())] += 1

    with dispatch.watch(note), torch.set_grad_enabled(grad):
        net(images)
    return choices


def _row(name, blocks, window, side, channels, module, macs, field) -> list[str]:
    return [
        name,
        blocks,
        window,
        f"{side[0]}x{side[1]}",
        str(channels),
        f"{count_params(module) / 1e6:.3f}",
        f"{macs / 1e9:.3f}",
        field,
    ]
