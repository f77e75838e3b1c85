"""A configuration from a folder of pictures: `wbmm train --data DIR` chooses here what it was not told.

Each choice is a row of a table, with its reason. What comes out is an ordinary configuration, saved with the run.
"""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import timm
import torch
import torch.nn as nn

import wbmm.models  # noqa: F401  (registers them)
from wbmm.data.discover import FoundData, find_data
from wbmm.data.lists import split_by_class, write_list
from wbmm.data.sources import open_source
from wbmm.machine import available_memory
from wbmm.models import WBMM
from wbmm.models.hub import published_weights
from wbmm.models.state import CheckpointError

from .config import TrainConfig, config_from_dict, make_config, parse_overrides

__all__ = ["Choices", "choose_recipe"]

EPOCHS, SIZE, MODEL = 20, 224, "wbmm_t"
SMALL, LARGE = 5_000, 100_000  # training pictures
STEPS_AN_EPOCH = 50  # at least, as far as batches of 4 go
FEW_STEPS = 20_000  # below, the blocks of a model from scratch would not get going from a layer scale of 1e-6
HELD_BACK = 0.2
SPLIT_FILE = "split.csv"
LESSONS = {  # by the number of training pictures
    "small": (
        {"auto": None, "color_jitter": 0.2, "reprob": 0.0, "scale": [0.35, 1.0]},
        {"mixup": 0.0, "cutmix": 0.0},
    ),
    "medium": (
        {"auto": None, "color_jitter": 0.2, "reprob": 0.0, "scale": [0.35, 1.0]},
        {"mixup": 0.2, "cutmix": 1.0, "prob": 0.5},
    ),
    "large": ({}, {}),  # the paper's
}


@dataclass
class Choices:
    """What was chosen.

    Attributes:
        config: complete and checked.
        rows: what, value and why, for people.
    """

    config: TrainConfig
    rows: list[tuple[str, str, str]] = field(default_factory=list)


def choose_recipe(
    data: str | Path,
    model: str = MODEL,
    epochs: int = EPOCHS,
    size: int = SIZE,
    init: str | None = None,
    overrides: tuple[str, ...] = (),
) -> Choices:
    """Looks at the data, the weights at hand and the machine.

    Args:
        data: train/ and val/ of class folders, class folders alone, a CSV file of paths and labels, or shards.
        model: a name that timm knows.
        epochs, size: of training, of the images.
        init: weights to start from; published ones are looked for otherwise.
        overrides: `key=value`, which win over every choice.

    A folder without a split is split once, each class in the same share; which picture goes where is written beside the
    run and read again by the next call.
    """
    given = parse_overrides(overrides)
    _check_model(model)
    found = find_data(Path(data))
    out = Path(given.get("out", f"runs/{_plain(Path(data).absolute().name)}-{_plain(model)}"))
    seed = given.get("seed", 0)
    values: dict = {"model": {"name": model}, "out": str(out), "schedule": {"epochs": epochs}}
    values["data"] = found.settings | {"size": size}
    rows = [("data", found.what, str(data))]
    rows += _split(found, values["data"], out, seed)
    pictures, classes = _count(values["data"], given)
    rows.append(("pictures to train on", f"{pictures:,}", f"{classes} classes"))
    device = _device(given.get("device", "auto"))
    _choose_batch(values, rows, pictures, device, model, classes, size)
    _choose_start(values, rows, model, init, pictures, epochs)
    _choose_lessons(values, rows, pictures)
    values["amp"] = _amp(device)
    rows.append(("amp", values["amp"], f"the device is {device}"))
    values["data"]["workers"] = _workers()
    rows.append(("workers", str(values["data"]["workers"]), f"{os.cpu_count()} cores"))
    return Choices(make_config(values, overrides, "the choices for --data"), rows)


def _check_model(name: str) -> None:
    if not timm.is_model(name.partition(".")[0]):
        raise ValueError(f"--model {name}: neither ours nor timm's; `wbmm list` shows ours")


def _plain(name: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in name)


def _split(found: FoundData, settings: dict, out: Path, seed: int) -> list[tuple[str, str, str]]:
    """Where nothing says what is for validation, a list that does, made once."""
    if found.unsplit is None:
        return []
    file = (out / SPLIT_FILE).absolute()
    again = file.is_file()
    if not again:
        write_list(split_by_class(found.unsplit, HELD_BACK, seed), file)
    settings["args"] = {"file": str(file)}
    why = "made by an earlier call" if again else "of each class, drawn by seed and path"
    return [("validation", f"{100 * HELD_BACK:g} %, listed in {file}", why)]


def _count(settings: dict, given: dict) -> tuple[int, int]:
    """How many pictures to train on, of how many classes."""
    data = given.get("data")
    config = config_from_dict({"data": settings | (data if isinstance(data, dict) else {})})
    source = open_source(config.data, train=True)
    return len(source), source.num_classes


def _device(wanted: str) -> torch.device:
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)


def _choose_batch(values: dict, rows: list, pictures: int, device: torch.device, model: str, classes: int, size: int):
    """The global batch by the data, what goes through the net at once by the memory."""
    most = 128 if pictures < LARGE else 1024
    world = int(os.environ.get("WORLD_SIZE", 1))
    wanted = max(pictures // STEPS_AN_EPOCH, 4)
    total = max(min(2 ** int(math.log2(wanted)), most), world)
    total -= total % world
    bytes_an_image = _bytes_an_image(model, classes, size)
    free = available_memory(device)
    batch = total // world
    while batch > 1 and batch * bytes_an_image > 0.5 * free:
        batch = _next_divisor(total // world, batch)
    values |= {"global_batch": total, "batch": batch}
    rows.append(("global_batch", str(total), f"about {max(pictures // total, 1)} steps an epoch"))
    need, there = batch * bytes_an_image / 2**30, free / 2**30
    rows.append(("batch", str(batch), f"{need:.1f} GB of activations, {there:.0f} GB are free"))


def _next_divisor(total: int, below: int) -> int:
    return next(size for size in range(below - 1, 0, -1) if total % size == 0)


def _bytes_an_image(name: str, classes: int, size: int) -> int:
    """What a training step keeps for the backward pass, from a forward pass of two images."""
    model = timm.create_model(name.partition(".")[0], num_classes=classes).train()
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.zeros(2, 3, size, size)).sum()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    del loss
    return max(sum(count for place, count in kept.items() if place not in weights) // 2, 1)


def _choose_start(values: dict, rows: list, model: str, init: str | None, pictures: int, epochs: int) -> None:
    """Fine-tuning from a file or from published weights; from scratch where there are neither."""
    why = "as given by --init"
    if init is None:
        try:
            found = published_weights(model)
        except CheckpointError as error:
            found, why = None, str(error)
        else:
            nothing = f"no weights are published for {model}; --init FILE starts from others"
            why = "published for this model" if found else nothing
        init = str(found) if found else None
    steps = epochs * pictures // values["global_batch"]
    if init:
        values["init"] = init
        values["optim"] = {"lr": 2.5e-4, "lr_batch": 64, "layer_decay": 0.8}
        values["schedule"]["warmup_epochs"] = min(1.0, epochs / 10)
        rows.append(("starts from", init, why))
    else:
        values["optim"] = {"lr": 1e-3, "lr_batch": 64}
        values["schedule"]["warmup_epochs"] = epochs / 10
        ours = model.partition(".")[0]
        if steps < FEW_STEPS and _is_ours(ours):
            values["model"]["args"] = {"ls_init_value": 0.1}
            rows.append(("layer scale", "0.1", f"{steps:,} steps are few for the family's 1e-6"))
        rows.append(("starts from", "scratch", why))
    rows.append(("learning rate", f"{values['optim']['lr']:g} for a batch of 64", "scaled with the global batch"))


def _is_ours(name: str) -> bool:
    with torch.device("meta"):
        net: nn.Module = timm.create_model(name, num_classes=2)
    return isinstance(net, WBMM)


def _choose_lessons(values: dict, rows: list, pictures: int) -> None:
    kind = "small" if pictures < SMALL else "medium" if pictures < LARGE else "large"
    augment, mix = LESSONS[kind]
    values |= {"augment": dict(augment), "mix": dict(mix)}
    text = {
        "small": "crops, flips, a little colour",
        "medium": "crops, flips, a little colour, CutMix and Mixup for every second batch",
        "large": "RandAugment, random erasing, Mixup and CutMix, as in the paper",
    }
    rows.append(("augmentation", text[kind], f"a {kind} set"))


def _amp(device: torch.device) -> str:
    if device.type != "cuda":
        return "none"
    return "bf16" if torch.cuda.is_bf16_supported() else "fp16"


def _workers() -> int:
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(8, (os.cpu_count() or 1) // processes - 1))
