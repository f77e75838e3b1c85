"""Models against each other: the same recipe, several seeds, one table with mean, spread and speed.

The speed is that of training steps at the end, of all nets in turn: runs of different days say nothing about it.

Every run has its own folder and is resumed where it stopped; finished ones are not run again. With `--records` a small
copy of each finished run (configuration and metrics, no weights) is kept in a folder that can be committed, so that the
comparison goes on elsewhere.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev

import timm
import torch
import torch.nn as nn
import yaml

import wbmm.models  # noqa: F401  (registers them)
from wbmm.handler import run_command
from wbmm.io.atomic import write_text
from wbmm.machine import machine_facts, measured_line
from wbmm.text import render_table
from wbmm.train.config import TrainConfig, load_config, to_dict
from wbmm.train.fit import fit
from wbmm.train.log import METRICS_FILE, STATUS_FILE
from wbmm.train.runs import RunFacts

from .setting import Setting, TrainingStep

__all__ = ["Contender", "add_arguments", "compare", "main", "parse_entry", "results_page", "run"]

MAY_DIFFER = {"out", "resume", "timeout", "device", "save", "log"}
HEAD = ("model", "parameters, M", "top-1 of each seed, %", "mean", "spread (highest - lowest)", "standard deviation")
SPEED_IS = (
    "Speed is of training steps (forward, loss, backward, AdamW) with the recipe's batch, all nets in turn in one run "
    "of {rounds} rounds, and its ratio to the last row's."
)
AUTOCAST = {"bf16": {"dtype": "bfloat16", "autocast": True}, "fp16": {"dtype": "float16", "autocast": True}}
SPEED = ("training images/s", "relative speed")


@dataclass(frozen=True)
class Contender:
    """What is compared.

    Attributes:
        label: names its runs and its row.
        model: timm name.
        args: for `timm.create_model`, beside those of the recipe.
    """

    label: str
    model: str
    args: dict = field(default_factory=dict)


def parse_entry(text: str) -> Contender:
    """`NAME`, or `NAME:MIXER` for a net of ours with another operator in its W blocks."""
    name, _, mixer = text.partition(":")
    return Contender(text.replace(":", "-"), name, {"mixer": mixer} if mixer else {})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="the recipe, e.g. configs/digits.yaml")
    models = "timm names, with a mixer if you like (wbmm_a:dw7); the last is the baseline of the speed"
    parser.add_argument("--models", nargs="+", required=True, type=parse_entry, metavar="NAME[:MIXER]", help=models)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="folder of the runs (default: runs/compare-<config>)")
    records = "folder that keeps config and metrics of finished runs; what it holds is not run again"
    parser.add_argument("--records", type=Path, metavar="DIR", help=records)
    parser.add_argument("--finished", action="store_true", help="train nothing: the page of what is finished")
    parser.add_argument("--results", type=Path, help="the page to write (default: results.md in that folder)")
    parser.add_argument("--rounds", type=int, default=10, help="of timed training steps at the end; 0: no speed")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="changes to the recipe")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/compare.py", description=__doc__)
    add_arguments(parser)
    return run_command("compare", lambda: run(parser.parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    out = args.out or Path("runs") / f"compare-{args.config.stem}"
    page = args.results or out / "results.md"
    if args.rounds < 0:
        raise ValueError(f"--rounds {args.rounds}: expected 0, for no speed, or more")
    runs = compare(args.config, args.models, args.seeds, out, args.set, args.records, args.finished)
    if runs is None:
        print("interrupted; the same command continues")
        return 1
    if not runs:
        raise ValueError(f"--finished: no run of this recipe is finished in {args.records or out}")
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, results_page(runs, args, args.config.stem))
    print(page.read_text())
    print(f"written to {page}")
    return 0


def compare(
    config: Path,
    entries: Sequence[Contender],
    seeds: Sequence[int],
    out: Path,
    overrides: Sequence[str] = (),
    records: Path | None = None,
    only_finished: bool = False,
) -> dict[str, list[RunFacts]] | None:
    """Trains what is not trained yet, the entries in turn for each seed; None if a signal stopped it.

    Args:
        records: keeps what the page needs of each finished run, and is looked at first.
        only_finished: leave out what is not trained yet.

    Returns:
        The runs of each label, one a seed.
    """
    if records is not None and records.exists() and not records.is_dir():
        raise ValueError(f"--records {records}: expected a folder, not a file")
    runs: dict[str, list[RunFacts]] = {entry.label: [] for entry in entries}
    for seed in seeds:
        for entry in entries:
            name = f"{entry.label}-seed{seed}"
            model = [f"model.name={entry.model}", *(f"model.args.{k}={json.dumps(v)}" for k, v in entry.args.items())]
            cfg = load_config(config, [*overrides, *model, f"seed={seed}", f"out={out / name}", "resume=auto"])
            places = [folder / name for folder in (records, out) if folder]
            done = next((place for place in places if _finished(cfg, place)), None)
            if done is None and only_finished:
                continue
            if done is None and fit(cfg).status != "finished":
                return None
            facts = RunFacts(done or out / name)
            if records and done != records / name:
                _keep(facts, records / name)
            runs[entry.label].append(facts)
    return {label: found for label, found in runs.items() if found}


def _same_recipe(config: dict) -> dict:
    return {key: value for key, value in config.items() if key not in MAY_DIFFER}


def _finished(cfg: TrainConfig, folder: Path) -> bool:
    """Whether this very run is done; a run of another recipe in its place is an error."""
    if not (folder / METRICS_FILE).is_file():
        return False
    before = RunFacts(folder)
    if before.config and _same_recipe(before.config) != _same_recipe(to_dict(cfg)):
        raise ValueError(f"{folder} holds a run of another recipe: remove it or choose another folder")
    return before.status == "finished"


def _keep(facts: RunFacts, folder: Path) -> None:
    """The status comes last: without it a copy does not count."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "config.yaml", yaml.safe_dump(_same_recipe(facts.config), sort_keys=False))
    for name in (METRICS_FILE, STATUS_FILE):
        write_text(folder / name, (facts.folder / name).read_text(encoding="utf-8"))


def results_page(runs: dict[str, list[RunFacts]], args: argparse.Namespace, title: str) -> str:
    """Markdown: the table, then where, when and how it was measured."""
    speeds = _speeds({label: facts[0] for label, facts in runs.items()}, args.rounds) if args.rounds else {}
    head = (*HEAD, *SPEED) if speeds else HEAD
    rows = [_row(label, facts, speeds) for label, facts in runs.items()]
    first = next(iter(runs.values()))[0]
    budget = f"{first.get('schedule.epochs')} epochs, {first.step} steps of {first.get('global_batch')} images"
    options = f" --records {args.records}" if args.records else ""
    options += f" --set {' '.join(args.set)}" if args.set else ""
    names = (entry.model + "".join(f":{mixer}" for mixer in entry.args.values()) for entry in args.models)
    command = (
        f"python tools/compare.py {args.config} --models {' '.join(names)} "
        f"--seeds {' '.join(map(str, args.seeds))}{'' if args.rounds else ' --rounds 0'}{options}"
    )
    return (
        f"# {title}: {' and '.join(runs)}\n\n"
        f"One recipe for all ([{args.config.name}](../../{args.config.as_posix()})): {first.get('data.source')} at "
        f"{first.get('data.size')} px, {budget}, from random weights. Top-1 on the validation set after the last epoch "
        f"(not the best one). {SPEED_IS.format(rounds=args.rounds) if speeds else ''}".rstrip()
        + "\n\n"
        f"{render_table(head, rows, markdown=True)}\n\n"
        f"{measured_line(machine_facts())} amp: {first.get('amp')}.\n\n```sh\n{command}\n```\n"
    )


def _row(label: str, facts: list[RunFacts], speeds: dict[str, float]) -> list[str]:
    top1 = [item.final["top1"] for item in facts]
    row = [
        label,
        f"{sum(parameter.numel() for parameter in _net(facts[0]).parameters()) / 1e6:.2f}",
        " ".join(f"{value:.2f}" for value in top1),
        f"{mean(top1):.2f}",
        f"{max(top1) - min(top1):.2f}" if len(top1) > 1 else "-",
        f"{stdev(top1):.2f}" if len(top1) > 1 else "-",
    ]
    if speeds:
        row += [f"{speeds[label]:.0f}", f"{speeds[label] / list(speeds.values())[-1]:.2f}x"]
    return row


def _net(facts: RunFacts) -> nn.Module:
    """The net of a run, with random weights."""
    classes, channels = facts.get("data.num_classes") or 1000, facts.get("data.in_chans")
    options = facts.get("model.args", {})
    return timm.create_model(facts.get("model.name"), num_classes=classes, in_chans=channels, **options)


def _speeds(runs: dict[str, RunFacts], rounds: int) -> dict[str, float]:
    """Images a second of a training step of each net, in turn, in the numbers of the first run."""
    numbers = AUTOCAST.get(next(iter(runs.values())).get("amp"), {})
    setting = Setting("cuda" if torch.cuda.is_available() else "cpu", **numbers)
    steps = {}
    for label, facts in runs.items():
        images = torch.randn(
            facts.get("batch"), facts.get("data.in_chans"), facts.get("data.size"), facts.get("data.size")
        )
        steps[label] = TrainingStep(setting.place(_net(facts)), setting.place(images), setting)
    timings = setting.time(steps, "training steps", rounds, warmup=1)
    return {label: runs[label].get("batch") / timing.median for label, timing in timings.items()}
