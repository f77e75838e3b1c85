"""`wbmm table NAME`: a table of the paper, its sizes and speed measured here, and trained small when asked."""

import argparse
import shlex
import sys
from pathlib import Path

import torch

import wbmm.models  # noqa: F401  (registers them)
from wbmm.bench.setting import Setting, add_setting_arguments
from wbmm.io.atomic import write_text
from wbmm.ops.backends.onednn.linear import takes_onednn
from wbmm.ops.profile import thresholds
from wbmm.paper_tables import Row, get_table, load_tables
from wbmm.train.runs import RunFacts

from .counted import COUNTED
from .measure import LAYOUTS, Costs, Measured, Timer, can_run, count_costs, find_recipe, train_small
from .table_page import check_pages, csv_text, markdown_text, read_trained, write_pages

BEST = "best"
SEEDS = 3
EXAMPLE = "wbmm table cross-operator --train fashion_mnist"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help=f"list (all 20 of the paper), or one of {', '.join((*load_tables(), *COUNTED))}")
    parser.add_argument("--rows", nargs="+", metavar="ID", help="these rows and the baselines of their ratios alone")
    parser.add_argument("--no-speed", action="store_true", help="do not measure speed")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 16], help="images of a forward pass (default: 1 16)"
    )
    parser.add_argument("--memory", action="store_true", help="peak memory of a training step, a process for each row")
    parser.add_argument("--train-batch", type=int, default=4, help="images of a training step (default: 4)")
    parser.add_argument("--size", type=int, help="side of the images when speed is measured (default: the table's)")
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds, all rows in each (default: 15)")
    add_setting_arguments(parser)
    parser.add_argument(
        "--layout",
        choices=(BEST, *LAYOUTS),
        help="memory format when speed is measured; best: each row in the faster one (default: best on CUDA, "
        "channels_last on a CPU)",
    )
    parser.add_argument(
        "--train", metavar="RECIPE", help="train the rows small: fashion_mnist, or a training configuration"
    )
    parser.add_argument(
        "--keep-trained",
        action="store_true",
        help="take small-scale accuracy over from the older page in --out, with its date, and measure the rest again",
    )
    parser.add_argument("--epochs", type=int, help="of the small recipe, in place of its own")
    parser.add_argument("--seeds", type=int, help="runs of each row, from seed 0 (default: 3)")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="changes to the small recipe")
    parser.add_argument("--runs", type=Path, help="folder of the training runs (default: runs/ablations/RECIPE/NAME)")
    parser.add_argument("--out", type=Path, help="folder of NAME.md and NAME.csv (default: runs/table-NAME)")


def _check(args: argparse.Namespace) -> None:
    for name in ("batch", "train_batch", "size", "rounds", "epochs", "seeds"):
        value = getattr(args, name)
        if value is not None and any(number < 1 for number in (value if isinstance(value, list) else [value])):
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected 1 or more")
    if args.keep_trained and (args.train or args.out is None):
        raise ValueError("--keep-trained takes the accuracy from the page in --out: give --out, and no --train")
    given = [name for name in ("epochs", "seeds", "set", "runs") if getattr(args, name)]
    if given and not args.train:
        raise ValueError(f"--{given[0]} is for training: say --train RECIPE as well")


def run(args: argparse.Namespace) -> int:
    _check(args)
    if args.name in COUNTED:
        return _counted(args)
    setting = None if args.no_speed else Setting.from_args(args)
    table = get_table(args.name)
    rows = table.select(args.rows)
    recipe = find_recipe(args.train) if args.train else None
    out = args.out or Path("runs") / f"table-{table.name}"
    check_pages(out, table.name, lambda row: _again(row, rows, args))
    trained = read_trained(out, table.name) if args.keep_trained else None
    measured = Measured(table, rows, {row.id: count_costs(row.model, row.args) for row in rows}, setting)
    # Training first: it can be interrupted, and then no speed has been measured in vain.
    if recipe and not _train(args, measured, recipe):
        print("interrupted; the same command continues", file=sys.stderr)
        return 1
    how = "" if setting is None else _measure_speed(args, measured, setting)
    text = markdown_text(measured, _command(args), how, trained), csv_text(measured, trained)
    page, sheet = write_pages(out, table.name, *text)
    print(page.read_text(encoding="utf-8"))
    print(f"written to {page} and {sheet}", file=sys.stderr)
    return 0


def _counted(args: argparse.Namespace) -> int:
    """A table in which nothing is timed."""
    text = COUNTED[args.name]()
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        write_text(args.out / f"{args.name}.md", f"{text}\n```sh\nwbmm table {args.name}\n```\n")
    return 0


def _again(old: dict[str, str], rows: list[Row], args: argparse.Namespace) -> bool:
    """Whether a row of an older sheet is measured again, in all that it has."""
    if old["row"] not in {row.id for row in rows}:
        return False
    trains = args.train or args.keep_trained
    return not (old.get("training_ratio") and args.no_speed) and not (old.get("small_top1_mean") and not trains)


def _train(args: argparse.Namespace, measured: Measured, recipe: Path) -> bool:
    """Fills in the small recipe's runs; False if a signal stopped them."""
    folder = args.runs or Path("runs/ablations") / Path(args.train).stem / measured.table.name
    overrides = [*args.set, *([f"schedule.epochs={args.epochs}"] if args.epochs else [])]
    found = train_small(measured.rows, recipe, args.seeds or SEEDS, folder, overrides)
    if found is None:
        return False
    measured.small, measured.recipe = found, args.train
    measured.small_costs = {
        row.id: _small_costs(row, found[row.id].runs[0]) for row in measured.rows if row.id in found
    }
    return True


def _small_costs(row: Row, facts: RunFacts) -> Costs:
    """Counted for the data of the run: its channels, classes and size."""
    args = dict(facts.get("model.args", {}))
    if facts.get("data.num_classes"):
        args["num_classes"] = facts.get("data.num_classes")
    return count_costs(row.small_model, args, facts.get("data.size"), facts.get("data.in_chans"))


def _measure_speed(args: argparse.Namespace, measured: Measured, setting: Setting) -> str:
    """Fills in the times and says how they were taken."""
    layout = args.layout or (BEST if setting.on_cuda else "channels_last")
    size = args.size or measured.table.size
    timer = Timer(setting, tuple(LAYOUTS) if layout == BEST else (layout,), size, args.rounds)
    rows = [row for row in measured.rows if can_run(row, setting)]
    measured.inference = timer.inference(rows, args.batch)
    measured.training_batch = args.train_batch
    measured.training = timer.training(rows, args.train_batch)
    if args.memory:
        measured.peaks = timer.memory(rows, args.train_batch)
    best = f" (each row in the faster of {' and '.join(LAYOUTS)})" if layout == BEST else ""
    return (
        f"Measured: medians of {args.rounds} rounds with all rows in turn, {size}x{size}, {setting.describe()}, eager, "
        f"layout {layout}{best}, {torch.get_num_threads()} threads; inference in the fused form, training as forward, "
        f"backward and AdamW step of the training form. {_operators(timer)}"
    ).rstrip()


def _operators(timer: Timer) -> str:
    """Which backends computed the windows that were timed."""
    found = {what: timer.backends.get((what, "windowed"), set()) for what in ("inference", "training")}
    if not any(found.values()):
        return ""
    text = " and ".join(f"by {', '.join(sorted(names))} in {what}" for what, names in found.items() if names)
    example = torch.zeros(1, device=timer.setting.device, dtype=timer.setting.product_dtype)
    if any("onednn" in names for names in found.values()) and takes_onednn(example):
        side = thresholds(torch.float32).least_side
        text += f"; from {side}x{side} on, onednn computes them as depthwise convolutions"
    return f"Windows are computed {text}."


def _command(args: argparse.Namespace) -> str:
    """What writes the same page again, with what was given and not the defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words: list[str] = ["wbmm", "table", args.name]
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if not action.option_strings or action.dest in ("help", "runs") or value == action.default:
            continue  # where runs are kept changes no figure
        words.append(action.option_strings[-1])
        if not isinstance(value, bool):
            words += map(str, value if isinstance(value, list) else [value])
    return shlex.join(words)
