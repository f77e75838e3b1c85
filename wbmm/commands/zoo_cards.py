"""The pages of models/: a card for each model, segmentor and detector, the tables of models/README.md, and README's.

Everything comes from zoo.yaml, the counts beside it, CITATION.cff and the result pages of docs/results. Results of the
paper and results measured here never share a column.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from wbmm.io.card import read_card
from wbmm.io.reader import read_checkpoint
from wbmm.paper_tables import load_tables
from wbmm.text import render_table
from wbmm.zoo import Downstream, ZooModel, load_counts, load_downstream, load_downstream_counts, load_zoo

from . import list as listing

__all__ = ["make_pages"]

NOTICE = "<!-- Written by tools/make_zoo.py. Change wbmm/zoo.yaml and run it again. -->"
LICENCE = "Apache-2.0"
TASKS = {
    "classification": "Image classifier and backbone.",
    "dense": "Backbone for segmentation and detection, with 7x7 windows.",
    "hierarchical": "Backbone for segmentation and detection, with hierarchical windows: 14x14, and 7x7 inside them.",
    "baseline": "UniRepLKNet, the paper's baseline: the same net with 13x13 depthwise convolutions.",
    "segmentation": "UPerNet for semantic segmentation on ADE20K.",
    "detection": "Detector with instance masks on COCO.",
}
METRICS = {
    "top1": "Top-1 %",
    "miou": "mIoU %",
    "miou_multi_scale": "multi-scale mIoU %",
    "box_ap": "box AP",
    "mask_ap": "mask AP",
}
MARKS = ("<!-- zoo: written by tools/make_zoo.py -->", "<!-- end -->")  # around the table of the project's README
NO_PAPER = "The paper has no row for it."
NOT_MEASURED = "Not trained here."
# Columns of docs/results that sum a run up, one in each table, and what stands before their figure.
SCORES = {"mean": "", "test mIoU %, checkpoint": "mIoU ", "box AP": "box AP "}

README = """\
{notice}
# Model zoo

```python
import timm, wbmm

model = timm.create_model("wbmm_t.in1k", pretrained=True).eval()  # downloads the authors' weights
```

Each name links to its card: architecture, results, weights, how to train it. `wbmm list` prints the first table in a
terminal.

- **params** (M; training form and fused) and **FLOPs** (G multiply-adds at 224x224, fused) are counted from the models.
- Columns marked **paper** are the paper's own figures. [docs/models.md](../docs/models.md) explains where ours differ.
- **measured here**: models that we trained, on the data named. The link leads to machine, date and command.
- **weights** are tags, as in `wbmm_t.in1k`. Without a tag in this column, you start from random weights.

## Backbones and classifiers

{models}

The `unireplknet_*` rows are the paper's baseline ([docs/baselines.md](../docs/baselines.md)). For them the column
*windows* has the name of the operator.

## Segmentation: UPerNet on ADE20K

Counted at 512x2048, fused. How to train and test: [docs/segmentation.md](../docs/segmentation.md).

{segmentors}

## Detection on COCO

Counted at 1280x800, fused. How to train and test: [docs/detection.md](../docs/detection.md).

{detectors}

Where our count differs from the paper's (the hierarchical models), the two pages say why. The released files load as
they are: [docs/checkpoints.md](../docs/checkpoints.md).
"""

CARD = """\
{notice}
# {name}

{task}

```{language}
{usage}
```

{facts}

## Results in the paper

{paper}

## Measured here

{measured}

## Weights

{weights}

## Training

{training}

## Citation

```bibtex
{citation}
```

[All models](README.md)
"""


def make_pages(root: Path) -> dict[str, str]:
    """Path of each page, relative to the root, to its text.

    Args:
        root: of the checkout.
    """
    results = list(read_results(root / "docs" / "results"))
    pages = {"README.md": _front_page(root), "models/README.md": _readme(results)}
    for model in load_zoo().values():
        pages[f"models/{model.name}.md"] = _model_card(root, model, results)
    for model in load_downstream().values():
        pages[f"models/{model.name}.md"] = _downstream_card(root, model, results)
    return pages


def _front_page(root: Path) -> str:
    """The project's README with its table of the models that the paper has results for."""
    headers = ("model", "params M", "FLOPs G", "ImageNet Top-1 % (paper)", "ADE20K mIoU % (paper)")
    headers += ("COCO box / mask AP (paper)", "weights")
    rows = []
    for model in load_zoo().values():
        paper, weights = dict(model.paper), list(model.weights)
        for other in load_downstream().values():
            if other.backbone == model.name:
                paper |= {key: value for key, value in other.paper.items() if key in METRICS}
                weights += other.weights
        if model.task != "baseline" and any(key in paper for key in METRICS):
            count = load_counts()[model.name]
            rows.append(
                [
                    f"[{model.name}](models/{model.name}.md)",
                    f"{count['params_fused'] / 1e6:.1f}",
                    f"{count['macs'] / 1e9:.1f}",
                    str(paper.get("top1", "-")),
                    str(paper.get("miou", "-")),
                    f"{paper['box_ap']} / {paper['mask_ap']}" if "box_ap" in paper else "-",
                    ", ".join(weights) or "-",
                ]
            )
    text = (root / "README.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{render_table(headers, rows, markdown=True)}\n{MARKS[1]}{after}"


@dataclass(frozen=True)
class RunResult:
    """A row of a result page.

    Attributes:
        page: its name in docs/results, without the ending.
        model: the first column.
        row: the other columns.
        measured: the page's line on machine, date and versions.
    """

    page: str
    model: str
    row: dict[str, str]
    measured: str


def read_results(folder: Path) -> Iterator[RunResult]:
    """The rows of the result tables in `folder`: first column `model`, as `tools/compare.py` writes them, or `run`.

    A run of `tools/dense_report.py` is named after its backbone, `wbmm-a-dense_HEADS`. Only its checkpoint counts. Of
    the tables on a page whose first column is `model`, the first counts.
    """
    for path in sorted(folder.glob("*.md")):
        headers, lines = None, path.read_text(encoding="utf-8").splitlines()
        seen = set()
        for line in lines:
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")] if line.startswith("| ") else None
            if cells is None:
                headers = None
            elif headers is None:
                headers = cells
            elif headers[0] == "model" and not set(line) <= set("|-: "):
                if cells[0] in seen:
                    continue
                seen.add(cells[0])
                row = dict(zip(headers[1:], cells[1:], strict=True))
                yield RunResult(path.stem, cells[0].strip("`"), row, _measured_line(lines, cells[0]))
            elif headers[0] == "run" and SCORES.keys() & headers and not set(line) <= set("|-: "):
                row = dict(zip(headers, cells, strict=True))
                if row.pop("form", "checkpoint") == "checkpoint":
                    model = cells[0].partition("_")[0].replace("-", "_")
                    yield RunResult(path.stem, model, row, _measured_line(lines, cells[0]))


def _measured_line(lines: list[str], run: str) -> str:
    """The page's line on machine, date and versions: that of a run where runs have lines of their own."""
    found = [line.partition("Measured:") for line in lines if "Measured:" in line]
    found.sort(key=lambda parts: run not in parts[0])
    return "".join(found[0][1:]) if found else ""


def _readme(results: list[RunResult]) -> str:
    headers = ["model", "task", "params M", "fused M", "params M (paper)", "FLOPs G", "FLOPs G (paper)"]
    headers += ["Top-1 % (paper)", "Top-1 % (measured here)", "blocks", "windows", "weights"]
    rows = [
        [f"[{row[0]}]({row[0]}.md)", *row[1:8], _measured_cell(row[0], results), *row[8:]] for row in listing.rows()
    ]
    tasks = {
        task: _downstream_table([model for model in load_downstream().values() if model.task == task], results)
        for task in ("segmentation", "detection")
    }
    return README.format(
        notice=NOTICE,
        models=render_table(headers, rows, markdown=True),
        segmentors=tasks["segmentation"],
        detectors=tasks["detection"],
    )


def _downstream_table(models: list[Downstream], results: list[RunResult]) -> str:
    counts = load_downstream_counts()
    metrics = [key for key in METRICS if any(key in model.paper for model in models)]
    headers = ["model", "params M", "fused M", "params M (paper)", "FLOPs G", "FLOPs G (paper)"]
    headers += [f"{METRICS[key]} (paper)" for key in metrics] + ["measured here", "config", "weights"]
    rows = []
    for model in models:
        count, paper = counts[model.name], model.paper
        rows.append(
            [
                f"[{model.name}]({model.name}.md)",
                f"{count['params'] / 1e6:.1f}",
                f"{count['params_fused'] / 1e6:.1f}",
                str(paper.get("params", "-")),
                f"{count['macs'] / 1e9:.0f}" if "macs" in count else "-",
                str(paper.get("flops", "-")),
                *(str(paper.get(key, "-")) for key in metrics),
                _measured_cell(model.name, results),
                f"[{Path(model.config).parent.name}](../{model.config})",
                ", ".join(model.weights) or "-",
            ]
        )
    return render_table(headers, rows, markdown=True)


def _measured_cell(name: str, results: list[RunResult]) -> str:
    """`98.61 (digits)` for each page that has the model; the mean over its seeds, mIoU or box AP."""
    found = [
        f"{label}{result.row[score]} ([{result.page}](../docs/results/{result.page}.md))"
        for result in results
        for score, label in SCORES.items()
        if result.model == name and score in result.row
    ]
    return ", ".join(found) or "-"


def _model_card(root: Path, model: ZooModel, results: list[RunResult]) -> str:
    count, tag = load_counts()[model.name], next(iter(model.weights), None)
    name = f'"{model.name}.{tag}", pretrained=True' if tag else f'"{model.name}"'
    windows = " ".join(map(str, model.window)) if model.mixer == "wbmm" else f"none; operator `{model.mixer}`"
    facts = [
        ["task", model.task],
        ["channels of the stages", " ".join(map(str, model.dims))],
        ["blocks of the stages", " ".join(model.pattern)],
        ["windows of the stages", windows],
        ["parameters", f"{count['params'] / 1e6:.2f} M in training form, {count['params_fused'] / 1e6:.2f} M fused"],
        ["FLOPs", f"{count['macs'] / 1e9:.2f} G multiply-adds at 224x224, fused"],
        ["configuration", f"[{model.config}](../{model.config})" if model.config else "-"],
    ]
    usage = f"import timm, wbmm\n\nmodel = timm.create_model({name}).eval()\n"
    usage += "fused = wbmm.fuse(model)  # the inference form: same outputs, fewer operations"
    return _card(root, model, results, facts=facts, usage=usage, language="python", training=_model_training(model))


def _downstream_card(root: Path, model: Downstream, results: list[RunResult]) -> str:
    count, segments = load_downstream_counts()[model.name], model.task == "segmentation"
    size = "512x2048" if segments else "1280x800"
    link = f"[{model.backbone}]({model.backbone}.md)" if model.backbone in load_zoo() else f"`{model.backbone}`"
    facts = [
        ["task", model.task],
        ["backbone", link],
        ["parameters", f"{count['params'] / 1e6:.1f} M in training form, {count['params_fused'] / 1e6:.1f} M fused"],
        ["FLOPs", f"{count['macs'] / 1e9:.0f} G multiply-adds at {size}, fused" if "macs" in count else "not counted"],
        ["configuration", f"[{Path(model.config).name}](../{model.config})"],
    ]
    command, tool = ("segment", "train_seg") if segments else ("detect", "train_det")
    file = next((source["file"] for source in model.weights.values() if "file" in source), "CHECKPOINT.pth")
    usage = f"wbmm {command} {file} photos/ --config {model.config}"
    training = f"```bash\ntorchrun --nproc_per_node=8 tools/{tool}.py {model.config}\n```"
    return _card(root, model, results, facts=facts, usage=usage, language="bash", training=training)


def _card(root: Path, model: ZooModel | Downstream, results: list[RunResult], facts: list, **parts: str) -> str:
    backbone = getattr(model, "backbone", model.name)
    return CARD.format(
        notice=NOTICE,
        name=model.name,
        task=TASKS[model.task],
        facts=render_table(["", ""], facts, markdown=True),
        paper=_paper(model.paper),
        measured=_measured(model.name, results),
        weights=_weights(root, model),
        citation=_citation(root, backbone),
        **parts,
    )


def _paper(paper: dict) -> str:
    if not paper:
        return NO_PAPER
    columns = {"params": "params M", "flops": "FLOPs G", **METRICS, "table": "table"}
    known = {title: str(paper[key]) for key, title in columns.items() if key in paper}
    return render_table(list(known), [list(known.values())], markdown=True)


def _measured(name: str, results: list[RunResult]) -> str:
    parts = []
    for result in results:
        if result.model == name:
            table = render_table(list(result.row), [list(result.row.values())], markdown=True)
            link = f"[{result.page}](../docs/results/{result.page}.md) has the recipe and the command."
            parts.append(f"{table}\n\n{link} {result.measured}".rstrip())
    return "\n\n".join(parts) or NOT_MEASURED


def _weights(root: Path, model: ZooModel | Downstream) -> str:
    if not model.weights:
        return "None published."
    rows = [[tag, *_describe_weights(root, source)] for tag, source in model.weights.items()]
    return render_table(["tag", "file", "form", "licence", "sha256"], rows, markdown=True)


def _describe_weights(root: Path, source: dict) -> list[str]:
    """File, form, licence and checksum. What a file in models/ says of itself is read from it."""
    form, checksum = source.get("form", "training"), source.get("sha256", "-")
    licence = source.get("licence")
    if "local" not in source:
        place = f"[{source['file']}](https://huggingface.co/{source['hub']}) on the Hugging Face hub"
        return [place, form, licence or "see the hub repository", checksum]
    path = root / "models" / source["local"]
    if path.is_file():
        card = read_card(read_checkpoint(path))
        form = card.form if card else form
        checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    units = {"num_classes": "classes", "size": "px"}
    about = "".join(f", {source[key]} {unit}" for key, unit in units.items() if key in source)
    return [f"[{source['local']}]({source['local']}) in this folder{about}", form, licence or LICENCE, checksum]


def _model_training(model: ZooModel) -> str:
    train = "torchrun --nproc_per_node=8 tools/train.py {} data.root=/data/imagenet"
    if model.config:
        return f"```bash\n{train.format(model.config)}\n```"
    for table in load_tables().values():
        for row in table.rows:
            if row.model == model.name and not (row.args or row.large_kernel) and row.recipe:
                return f"```bash\n{train.format(f'table:{table.name}/{row.id}')}\n```"
    letter = model.name.split("_")[1]
    command = train.format(f"configs/imagenet/wbmm_{letter}.yaml model.name={model.name}")
    note = f"It has no recipe of its own. This is that of `wbmm_{letter}`, and has not been tried:"
    return f"{note}\n\n```bash\n{command}\n```"


def _citation(root: Path, backbone: str) -> str:
    """BibTeX of the paper, and of the baseline where the net is one."""
    cff = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    works = [cff["preferred-citation"]]
    titles = {"unireplknet": "UniRepLKNet", "convnext": "A ConvNet"}
    for prefix, title in titles.items():
        if backbone.startswith(prefix):
            works += [work for work in cff["references"] if work["title"].startswith(title)]
    return "\n\n".join(map(_bibtex, works))


def _bibtex(work: dict) -> str:
    authors = " and ".join(f"{who['family-names']}, {who['given-names']}" for who in work["authors"])
    word = re.match(r"(?:A )?(\w+)", work["title"])[1].lower()
    key = f"{work['authors'][0]['family-names'].lower()}{work['year']}{word}"
    return (
        f"@inproceedings{{{key},\n  title     = {{{work['title']}}},\n  author    = {{{authors}}},\n"
        f"  booktitle = {{{work['collection-title']}}},\n  year      = {{{work['year']}}}\n}}"
    )
