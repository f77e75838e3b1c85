"""A configuration from a folder of pictures: `wbmm train --data DIR` chooses here what it was not told.

Each choice is a row of a table, with its reason. What comes out is an ordinary configuration, saved with the run.
"""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import timm
import torch

import wbmm.models  # noqa: F401  (registers them)
from wbmm.data.discover import FoundData, find_data
from wbmm.data.folders import PictureList, locate, read_list, split_by_class, write_list
from wbmm.data.sources import open_source
from wbmm.fields import show
from wbmm.io.card import ModelCard, read_card
from wbmm.io.files import run_checkpoint
from wbmm.io.reader import read_checkpoint
from wbmm.machine import available_memory
from wbmm.models import WBMM
from wbmm.models.hub import local_weights, published_weights
from wbmm.models.state import CheckpointError
from wbmm.text import counted, some

from .checkpoint import check_free
from .config import (
    TrainConfig,
    check_given,
    config_from_dict,
    flatten,
    make_config,
    merge_values,
    parse_overrides,
    to_dict,
)
from .dist import pick_device
from .log import METRICS_FILE
from .model import create_model

__all__ = ["EPOCHS", "MODEL", "SCRATCH", "SIZE", "Recipe", "Start", "choose_recipe", "find_start"]

MODEL = "wbmm_t"
SMALL_MODEL = "wbmm_a"  # trains on a CPU, and its weights come with the project
SCRATCH = "scratch"  # --init scratch: no weights, though there may be some
EPOCHS, SIZE = 20, 224
SMALL, LARGE = 5_000, 100_000  # training pictures
STEPS_AN_EPOCH = 25  # at least, as far as the smallest batch goes
LEAST_BATCH, MOST_BATCH, LARGE_BATCH = 16, 128, 1024
LEAST_STEPS = {True: 30, False: 500}  # of fine-tuning, and from scratch; fewer are pointed out
FEW_STEPS = 20_000  # below, the blocks of a model from scratch would not get going from a layer scale of 1e-6
POINTS = 200  # of the curves, at least where there are so many steps
HELD_BACK = 0.2
AS_GIVEN, COMES_WITH_IT = "as given", "comes with the project"
COMMAND = "the command"  # where a wrong value stands
SPLIT_FILE = "split.csv"
# AdamW's rates for a batch of 64, with the square root of the batch for others.
SCRATCH_LR, FINE_TUNING_LR = 1e-3, 2.5e-4
LESSONS = {  # by the number of training pictures: augment, mix, and both in words
    "small": (
        {"auto": None, "color_jitter": 0.2, "reprob": 0.0, "scale": [0.35, 1.0]},
        {"mixup": 0.0, "cutmix": 0.0},
        "crops, flips, a little colour",
    ),
    "medium": (
        {"auto": None, "color_jitter": 0.2, "reprob": 0.0, "scale": [0.35, 1.0]},
        {"mixup": 0.2, "cutmix": 1.0, "prob": 0.5},
        "crops, flips, a little colour; CutMix or Mixup for every second batch",
    ),
    "large": ({}, {}, "RandAugment, random erasing, Mixup and CutMix, as in the paper"),
}


@dataclass
class Start:
    """The weights that a run starts from.

    Attributes:
        file: None for a start from scratch.
        why: in a few words.
        card: what the file says of its model, if it says anything.
        note: a sentence about what is missing.
    """

    file: Path | None
    why: str
    card: ModelCard | None = None
    note: str = ""


def find_start(model: str | None, init: str | None) -> Start:
    """Looks for weights.

    Args:
        model: a name that timm knows, with or without the tag of its weights; `MODEL` if None.
        init: a file or a run's folder; `SCRATCH` for none; None for those that are published, if they can be reached.
    """
    if init == SCRATCH:
        return Start(None, AS_GIVEN)
    if init is not None:
        return _given_start(run_checkpoint(init), model)
    model = model or MODEL
    _check_name(model)
    scratch = "so it starts from scratch, which needs more pictures and epochs than fine-tuning"
    try:
        file = published_weights(model)
    except CheckpointError as error:
        return Start(None, "see below", note=f"{error}. Until then it starts from scratch.")
    if file is None:
        note = f"No weights are published for {model}, {scratch}; --init FILE starts from others."
        return Start(None, "see below", note=note)
    why = COMES_WITH_IT if file == local_weights(model) else "published for this model"
    return Start(file, why, read_card(read_checkpoint(file)))


def _given_start(file: Path, model: str | None) -> Start:
    if not file.is_file():
        raise ValueError(f"--init {file}: there is no such file (or give the folder of a run, or {SCRATCH})")
    card = read_card(read_checkpoint(file))
    if card and model and model.partition(".")[0] != card.model:
        raise ValueError(f"--init {file} has the weights of {card.model}, not of {model}: leave --model out")
    return Start(file, AS_GIVEN, card)


def _check_name(name: str) -> None:
    """Raises unless timm knows a model, and weights, of that name."""
    if not timm.is_model(name):
        raise ValueError(f"--model {name}: neither ours nor timm's; `wbmm list` shows ours")
    if "." in name and name not in timm.list_models(f"{name.partition('.')[0]}.*", pretrained=True):
        raise ValueError(f"--model {name}: timm knows no weights of that name for {name.partition('.')[0]}")


@dataclass
class Recipe:
    """What was chosen.

    Attributes:
        config: complete and checked.
        rows: what, value and why, for people.
        notes: sentences that belong below the table.
    """

    config: TrainConfig
    rows: list[tuple[str, str, str]]
    notes: list[str] = field(default_factory=list)


def choose_recipe(
    data: str | Path,
    model: str | None = None,
    epochs: int | None = None,
    size: int | None = None,
    init: str | None = None,
    overrides: tuple[str, ...] = (),
) -> Recipe:
    """Looks at the data, the weights at hand and the machine.

    Args:
        data: train/ and val/ of class folders, class folders alone, a CSV file of paths and labels, or shards.
        model: a name that timm knows, with the tag of its weights if there are several; `MODEL` if None, or the model
            of the weights.
        epochs: of training; `EPOCHS` if None.
        size: of the images; `SIZE` if None, or the size that the weights were trained at.
        init: a file, or a run's folder, to start from; `SCRATCH` for none; published weights are looked for if None.
        overrides: `key=value`, which win over every choice.

    A folder without a split is split once, each class in the same share; which picture goes where is written beside the
    run and read again by the next call.
    """
    given = parse_overrides(overrides)
    check_given(given, COMMAND)
    model = _given(given, "model.name", model, "--model")
    epochs = _given(given, "schedule.epochs", epochs, "--epochs")
    epochs = EPOCHS if epochs is None else epochs
    size = _given(given, "data.size", size, "--size")
    check_given({"schedule": {"epochs": epochs}} | ({} if size is None else {"data": {"size": size}}), COMMAND)
    device = pick_device(flatten(given).get("device", "auto"))
    found = find_data(data)
    start = find_start(model, _given(given, "init", init, "--init"))
    table = ChoiceTable(given)
    table.text("data", found.what, str(data))
    name, args = _choose_model(model, start)
    out = _choose_out(given, data, name)
    net = {"name": name, "args": merge_values(args, given.get("model", {}).get("args", {}))}
    values: dict = {"model": net, "out": str(out), "schedule": {"epochs": epochs}}
    values["data"] = dict(found.settings)
    split = _split(found, values["data"], out, _given(given, "seed") or 0, table)
    pictures, classes = _count(values["data"], given, split)
    table.text("training", f"{pictures:,} pictures", f"{classes} classes")
    table.field("model.name", "model", "" if model else _why_model(start, device))
    values["data"] |= _choose_images(table, size, start)
    table.field("schedule.epochs", "epochs")
    _choose_batch(values, table, pictures, classes, device)
    _choose_rates(values, table, start, pictures)
    _choose_lessons(values, table, pictures)
    _choose_machine(values, table, device)
    if given.get("resume") not in (None, "auto"):
        values.pop("init", None)  # the checkpoint has the weights
    others = [text for text in overrides if not text.startswith("init=")]  # which may be a folder, or `scratch`
    config = make_config(values, others, COMMAND)
    if split is not None:
        write_list(split, Path(config.data.args["file"]))
    notes = [note for note in (start.note, _too_few(config, pictures)) if note]
    return Recipe(config, table.fill(config), notes)


def _too_few(config: TrainConfig, pictures: int) -> str:
    """What to do about a training of a few steps; empty where there are enough."""
    an_epoch, least = max(pictures // config.global_batch, 1), LEAST_STEPS[config.init is not None]
    steps = round(config.schedule.epochs * an_epoch)
    if steps >= least:
        return ""
    return (
        f"Only {counted(steps, 'step')} of training; a model learns little in fewer than {least}: add pictures, or use "
        f"--epochs {math.ceil(least / an_epoch)} or more."
    )


class ChoiceTable:
    """The choices as rows, filled in from the configuration at the end: what the user gave has won by then."""

    def __init__(self, given: dict) -> None:
        self.given = flatten(given)
        self.rows: list[tuple[str, str, str]] = []
        self.keys: dict[int, str] = {}

    def text(self, what: str, value: str, why: str = "") -> None:
        """A row that says something."""
        self.rows.append((what, value, why))

    def field(self, key: str, what: str, why: str = "", unit: str = "") -> None:
        """A row for a value of the configuration."""
        self.keys[len(self.rows)] = key
        self.rows.append((what, unit, why))

    def fill(self, config: TrainConfig) -> list[tuple[str, str, str]]:
        known, rows = flatten(to_dict(config)), []
        for place, (what, value, why) in enumerate(self.rows):
            key = self.keys.get(place)
            if key is not None:
                value, why = f"{_plain(known[key])} {value}".rstrip(), AS_GIVEN if key in self.given else why
            rows.append((what, value, why))
        shown = {"out", "init", *self.keys.values()}
        others = [f"{key}={show(value)}" for key, value in self.given.items() if key not in shown]
        if others:
            rows.append(("also given", " ".join(others), ""))
        return [*rows, ("folder of the run", config.out, AS_GIVEN if "out" in self.given else "")]


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _given(given: dict, key: str, option=None, name: str = ""):
    """What an option or an override says; both is an error."""
    override = flatten(given).get(key)
    if option is not None and override is not None and option != override:
        raise ValueError(f"{name} {option} and {key}={override}: give one of them")
    return override if option is None else option


def _choose_model(model: str | None, start: Start) -> tuple[str, dict]:
    """The name without the tag of its weights, and the arguments that the weights were built with."""
    if start.card is not None:
        args = {key: value for key, value in start.card.args.items() if value is not None}
        return start.card.model, args
    _check_name(model or MODEL)
    return (model or MODEL).partition(".")[0], {}


def _why_model(start: Start, device: torch.device) -> str:
    """Why this model, where none was named."""
    if start.why == AS_GIVEN and start.card is not None:
        return "of the weights"
    return f"the default; without a GPU take --model {SMALL_MODEL}" if device.type == "cpu" else "the default"


def _choose_images(table: ChoiceTable, size: int | None, start: Start) -> dict:
    """Size and colours: those of the weights, where they say."""
    file = start.file.name if start.file and start.why == COMES_WITH_IT else start.file
    table.text("starts from", str(file or SCRATCH), start.why)
    if start.card is None:
        table.field("data.size", "image size", "the default" if size is None else AS_GIVEN, "px")
        return {"size": SIZE if size is None else size}
    card = start.card
    table.field("data.size", "image size", "what the weights were trained at" if size is None else AS_GIVEN, "px")
    transform = {"mean": list(card.mean), "std": list(card.std), "interpolation": card.interpolation}
    return {"size": card.input_size[-1] if size is None else size, "in_chans": card.input_size[0], **transform}


def _choose_out(given: dict, data: str | Path, model: str) -> Path:
    """`runs/<data>-<model>`, with a number where a run is there already; a run that goes on keeps its folder."""
    resume = given.get("resume")
    if resume not in (None, "auto") and "out" not in given:
        return Path(resume).expanduser().parent
    if "out" in given:
        out = Path(str(given["out"])).expanduser()
        if not resume:
            check_free(out)
        return out
    plain = "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in Path(data).absolute().name)
    name = f"{plain.removesuffix('.csv')}-{model}"
    folders = [Path("runs") / (name if number == 1 else f"{name}-{number}") for number in range(1, 10_000)]
    free = next(place for place, folder in enumerate(folders) if not (folder / METRICS_FILE).exists())
    return folders[max(free - 1, 0)] if resume == "auto" else folders[free]


def _split(found: FoundData, settings: dict, out: Path, seed: int, table: ChoiceTable) -> PictureList | None:
    """Where nothing says what is for validation, a list that does, made once."""
    if found.unsplit is None:
        return None
    file = (out / SPLIT_FILE).absolute()
    settings["args"] = {"file": str(file)}
    locate(Path(settings["root"]), found.unsplit.paths)  # before anything is written
    split, why = split_by_class(found.unsplit, HELD_BACK, seed), f"{100 * HELD_BACK:g} % of each class"
    if file.is_file():
        split, why = _same_pictures(file, found.unsplit), "split by an earlier run"
    table.text("validation", f"{split.splits.count('val'):,} pictures", f"{why}: {file.name} in the run's folder")
    return split


def _same_pictures(file: Path, there: PictureList) -> PictureList:
    """An earlier split, if it is of the same pictures."""
    earlier = read_list(file)
    old, new = set(zip(earlier.paths, earlier.labels, strict=True)), set(zip(there.paths, there.labels, strict=True))
    if earlier.splits is None or old != new:
        seen = some([path for path, _ in sorted(old ^ new)], 2)
        raise ValueError(
            f"{file} splits other pictures than there are now ({len(new - old)} are new, {len(old - new)} are gone: "
            f"{seen}): give another out=FOLDER, or remove that file to split anew"
        )
    return earlier


def _count(settings: dict, given: dict, split: PictureList | None) -> tuple[int, int]:
    """How many pictures to train on, of how many classes."""
    if split is not None and not given.get("data"):
        return split.splits.count("train"), len(split.class_names)
    if split is not None:
        write_list(split, Path(settings["args"]["file"]))
    config = config_from_dict(merge_values({"data": settings}, {"data": given.get("data", {})}))
    source = open_source(config.data, train=True)
    return len(source), source.num_classes


def _choose_batch(values: dict, table: ChoiceTable, pictures: int, classes: int, device: torch.device) -> None:
    """The global batch by the data, as a multiple of a given batch; what goes through the net at once by the memory."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    at_once = table.given.get("batch", 1) * world
    total = table.given.get("global_batch") or math.ceil(_global_batch(pictures, world) / at_once) * at_once
    images = values["data"] | {key: table.given[f"data.{key}"] for key in ("in_chans",) if f"data.{key}" in table.given}
    need = _bytes_an_image(values["model"], classes, images.get("in_chans", 3), values["data"]["size"])
    free = available_memory(device)
    batch = max(total // world, 1)
    while batch > 1 and (batch * need > 0.5 * free or (batch % 2 and batch != total // world)):
        batch = next(size for size in range(batch - 1, 0, -1) if (total // world) % size == 0)
    values |= {"global_batch": total, "batch": batch}
    table.field("global_batch", "global batch", f"{counted(max(pictures // total, 1), 'step')} an epoch")
    space = f"about {batch * need / 2**20:,.0f} MB of activations, {free / 2**20:,.0f} MB are free"
    table.field("batch", "batch at once", space)


def _global_batch(pictures: int, world: int) -> int:
    """A power of two that leaves enough steps, a multiple of the processes, and no more than there are pictures."""
    most = MOST_BATCH if pictures < LARGE else LARGE_BATCH
    wanted = min(max(2 ** int(math.log2(max(pictures / STEPS_AN_EPOCH, 1))), LEAST_BATCH), most)
    while wanted > pictures and wanted > 2:
        wanted //= 2
    return max(wanted - wanted % world, world)


def _bytes_an_image(model: dict, classes: int, channels: int, size: int) -> int:
    """What a training step keeps for the backward pass, from a forward pass of two images."""
    net = create_model(model["name"], model["args"], 0.0, channels, classes).train()
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = net(torch.zeros(2, channels, size, size)).sum()
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"{model['name']} takes no images of {size} px (--size): {error}") from None
    weights = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    del loss
    return max(sum(count for place, count in kept.items() if place not in weights) // 2, 1)


def _choose_rates(values: dict, table: ChoiceTable, start: Start, pictures: int) -> None:
    """Learning rate, warm-up and what else depends on where the weights come from."""
    total, epochs = values["global_batch"], values["schedule"]["epochs"]
    steps = epochs * max(pictures // total, 1)
    if start.file:
        values["init"] = str(start.file)
        values["optim"] = {"lr": _rate(FINE_TUNING_LR, total), "lr_batch": total, "layer_decay": 0.8}
        values["schedule"]["warmup_epochs"] = min(1.0, epochs / 10)
        table.field("optim.lr", "learning rate", "for fine-tuning; 0.8 times as much for each layer further down")
    else:
        values["optim"] = {"lr": _rate(SCRATCH_LR, total), "lr_batch": total}
        values["schedule"]["warmup_epochs"] = epochs / 10
        table.field("optim.lr", "learning rate", "for a start from scratch, with this global batch")
        if steps < FEW_STEPS and _is_ours(values["model"]):
            values["model"]["args"] |= {"ls_init_value": 0.1}
            table.text("layer scale", "0.1", f"{steps:,} steps are few for the family's 1e-6")
    values["log"] = {"every": min(max(steps // POINTS, 1), 50)}


def _rate(lr: float, batch: int) -> float:
    return float(f"{lr * math.sqrt(batch / 64):.2g}")


def _is_ours(model: dict) -> bool:
    with torch.device("meta"):
        return isinstance(create_model(model["name"], model["args"], 0.0, 3, 2), WBMM)


def _choose_lessons(values: dict, table: ChoiceTable, pictures: int) -> None:
    kind = "small" if pictures < SMALL else "medium" if pictures < LARGE else "large"
    augment, mix, words = LESSONS[kind]
    values |= {"augment": dict(augment), "mix": dict(mix)}
    if values["batch"] % 2:  # mixing pairs the images of a batch
        values["mix"] |= {"mixup": 0.0, "cutmix": 0.0}
        words = words.partition(";")[0]
    table.text("augmentation", words, f"a {kind} set")


def _choose_machine(values: dict, table: ChoiceTable, device: torch.device) -> None:
    """Arithmetic and processes, by what there is."""
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    values["amp"] = "none" if device.type != "cuda" else "bf16" if bf16 else "fp16"
    table.field("amp", "mixed precision", f"the device is {device}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    values["data"]["workers"] = max(1, min(8, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1))
    table.field("data.workers", "workers", f"{cores} cores")
