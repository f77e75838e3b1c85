"""Tables of the paper in which nothing is timed: segmentors and detectors, attention, architectures, recipes."""

import math
import sys
from collections.abc import Callable

from wbmm.bench import detectors, segmentors
from wbmm.layers.baselines import HEAD_DIM
from wbmm.paper_tables import DenseTable, load_commands, load_dense_tables, load_recipes
from wbmm.text import render_table
from wbmm.train.config import load_config
from wbmm.zoo import load_counts, load_zoo

from .measure import count_costs
from .table_page import dense_contradictions

__all__ = ["COUNTED"]

SIZES = ("p", "n", "t", "s")
BATCHES = (1, 16, 128)
PRINTED = {
    "miou": "mIoU, single scale",
    "miou_ms": "mIoU, multi-scale",
    "ap_box": "AP of boxes",
    "ap_mask": "AP of masks",
}


def _page(name: str, label: str, text: str, *parts: str) -> str:
    return "\n\n".join([f"# wbmm table {name}", f"The paper's `{label}`. {text}".strip(), *parts]) + "\n"


def _dense(table: DenseTable) -> str:
    """Whole nets: parameters and FLOPs counted, the paper's figures beside them."""
    accuracies = [key for key in PRINTED if key in table.rows[0].paper]
    rows = []
    for row in table.rows:
        print(f"counting {row.id}", file=sys.stderr, flush=True)
        if table.name == "ade20k":
            params, macs = segmentors.count(row.backbone, row.size)
        else:
            params, _, parts = detectors.count(detectors.build(row.backbone, row.size))
            macs = parts[""]
        printed = [str(row.paper[key]) for key in ("params", "flops", *accuracies)]
        counted = f"{params / 1e6:.1f}", f"{macs / 1e9:.0f}"
        rows.append([f"{row.backbone}, {row.size.upper()}", counted[0], printed[0], counted[1], *printed[1:]])
    heads = (
        "backbone",
        "params M",
        "paper: params M",
        "FLOPs G",
        "paper: FLOPs G",
        *(f"paper: {PRINTED[k]}" for k in accuracies),
    )
    text = f"{table.title}. {table.note} Parameters and multiply-adds are counted; *paper* columns are what it prints."
    notes = [f"The paper disagrees with itself: {note}" for note in dense_contradictions() if table.name == "ade20k"]
    more = "docs/segmentation.md and docs/detection.md say why hierarchical tables add less by our count than in print."
    return _page(table.name, table.label, text, render_table(heads, rows, markdown=True), more, *notes)


def _attention() -> str:
    """What a forward pass spends on making the weights of a window, counted for the stages of the T net at 224 px."""
    zoo = load_zoo()["wbmm_t_dense"]
    side, area, rows = 224 // 4, 7 * 7, []
    for stage, channels in enumerate(zoo.dims, 1):
        windows, heads = math.ceil(side / 7) ** 2, channels // HEAD_DIM
        for batch in BATCHES:
            made = channels * area**2
            attended = batch * windows * heads * area**2
            rows.append(
                [
                    f"S{stage}, {channels} channels, {side}x{side}",
                    str(batch),
                    f"{made / 1e6:.2f}",
                    f"{attended / 1e6:.2f}",
                    f"{attended * HEAD_DIM / 1e6:.1f}",
                    f"{2 * batch * windows * heads * area / 1e6:.3f}",
                ]
            )
        side = math.ceil(side / 2)
    heads = (
        *("stage", "batch", "WBMM: entries looked up, M", "attention: entries computed, M"),
        *("attention: multiply-adds for them, M", "attention: sums and maxima of softmax, M"),
    )
    nets = [("WBMM, w = 7", {}), ("window attention, MLP ratio 2.5", {"mixer": "win_attn"})]
    counts = [(label, count_costs("wbmm_t_dense", args)) for label, args in nets]
    costs = render_table(
        ("net", "params M", "FLOPs G"),
        [[label, f"{cost.params / 1e6:.2f}", f"{cost.macs_fused / 1e9:.2f}"] for label, cost in counts],
        markdown=True,
    )
    properties = render_table(
        ("property", "WBMM", "window attention"),
        [
            [
                "weights of a window",
                "C d^2 entries of a table, once for all windows and images",
                "B N d^2 for each head",
            ],
            ["softmax", "none", "over d entries, for every position of every window"],
            ["with the batch", "the same", "in proportion"],
            ["in inference", "kept: nothing to make", "made for every image"],
            ["depends on the input", "no", "yes"],
        ],
        markdown=True,
    )
    text = (
        "What a pass of one layer spends on the weights of its windows, counted: d = 49 positions, N windows an image, "
        f"C channels, heads of {HEAD_DIM} channels. WBMM looks its matrix up in a table, whatever the batch; attention "
        "computes one for every window of every image. Beside the table of the two whole nets, "
        "`wbmm table cross-operator --rows win-attn` measures their speed."
    )
    return _page("attention", "tab:wbmm_vs_attn", text, properties, render_table(heads, rows, markdown=True), costs)


def _specs() -> str:
    """Depths, channels and patterns of the family, from the zoo."""
    zoo, counts, rows = load_zoo(), load_counts(), []
    for name in (*(f"wbmm_{size}" for size in SIZES), *(f"wbmm_{s}_{k}" for s in "ts" for k in ("dense", "hier"))):
        model, printed = zoo[name], zoo[name].paper
        figures = f"{counts[name]['params_fused'] / 1e6:.1f}", f"{counts[name]['macs'] / 1e9:.2f}"
        windows = " ".join(map(str, model.window))
        paper = [str(printed.get(key, "--")) for key in ("params", "flops")]
        rows.append(
            [
                name,
                " ".join(map(str, model.dims)),
                " ".join(model.pattern),
                windows,
                figures[0],
                paper[0],
                figures[1],
                paper[1],
            ]
        )
    heads = (
        "model",
        "channels",
        "blocks of S1 to S4",
        "windows",
        "params M",
        "paper: params M",
        "FLOPs G",
        "paper: FLOPs G",
    )
    text = (
        "W is WBMM, D a 3x3 depthwise convolution, M WBMM with depthwise kernels beside it in training; counted in the "
        "fused form. The paper's table of patterns marks the dense-prediction nets with hierarchical windows."
    )
    return _page("specs", "tab:model_specs` and `tab:stage_patterns", text, render_table(heads, rows, markdown=True))


def _recipes() -> str:
    """The ImageNet recipes of configs/ beside the paper's."""
    configs = [load_config(f"imagenet/wbmm_{size}") for size in SIZES]
    rows = []
    for key, printed in load_recipes().items():
        values = []
        for config in configs:
            value = config
            for part in key.split("."):
                value = getattr(value, part)
            values.append(value)
        paper = printed if isinstance(printed, list) else [printed] * len(SIZES)
        same = "yes" if values == paper else "no"
        rows.append([f"`{key}`", " ".join(map(str, values)), " ".join(map(str, paper)), same])
    heads = ("setting", "configs/imagenet: P N T S", "paper: P N T S", "the same")
    text = (
        "The released script warms up over 20 epochs by default, the paper says 5: we follow the paper. All else "
        "in a run is in its configuration; docs/training.md says what the paper leaves open."
    )
    return _page("recipes", "tab:imagenet_config", text, render_table(heads, rows, markdown=True))


def _list() -> str:
    """Every table of the paper and its command."""
    rows = [[label, f"`{command}`"] for label, command in load_commands().items()]
    return render_table(("the paper's table", "command"), rows, markdown=True) + "\n"


COUNTED: dict[str, Callable[[], str]] = {
    "ade20k": lambda: _dense(load_dense_tables()["ade20k"]),
    "coco": lambda: _dense(load_dense_tables()["coco"]),
    "attention": _attention,
    "specs": _specs,
    "recipes": _recipes,
    "list": _list,
}
