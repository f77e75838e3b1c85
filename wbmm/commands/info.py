"""`wbmm info`: one model, stage by stage."""

import argparse

from wbmm.text import render_table

EXAMPLE = "wbmm info wbmm_t_hier --size 512 512"
HEADERS = ("stage", "blocks", "window", "map", "channels", "params M", "FLOPs G", "receptive field")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a name from `wbmm list`")
    parser.add_argument("--size", type=int, nargs=2, default=(224, 224), metavar=("H", "W"), help="input size")


def check_name(name: str) -> str:
    """A name of the zoo, or an error with the nearest ones."""
    import difflib

    from wbmm.zoo import load_zoo

    if name not in load_zoo():
        near = difflib.get_close_matches(name, load_zoo(), n=3, cutoff=0.4)
        raise ValueError(
            f"unknown model {name!r}; " + (f"did you mean {', '.join(near)}?" if near else "see `wbmm list`")
        )
    return name


def run(args: argparse.Namespace) -> int:
    from wbmm.models.profile import build_on_meta, count_macs, count_params, receptive_fields
    from wbmm.zoo import load_zoo

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
        print(
            f"weights: {model.name}.{tag}: {source['hub']}/{source['file']} (timm.create_model(..., pretrained=True))"
        )
    print(
        "receptive field: largest extent in input pixels through convolutions and windows; SE and GRN see the whole map"
    )
    return 0


def _row(name, blocks, window, side, channels, module, macs, field) -> list[str]:
    from wbmm.models.profile import count_params

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
