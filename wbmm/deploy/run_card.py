"""The model card of a training run, in Markdown: what the model is, how good, on what, and how to use it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn as nn

from wbmm.machine import machine_facts, measured_line
from wbmm.train.config import TrainConfig
from wbmm.train.console import duration
from wbmm.train.runs import RunFacts

from .evaluate import Evaluation, top
from .mistakes import ClassScore, class_table

__all__ = ["CARD_FILE", "CardFacts", "card_text"]

CARD_FILE = "model_card.md"
MOST_CLASSES = 50  # in the table
PICTURES = ("curves.png", "confusion.png", "classes.png", "mistakes.png", "train_batch.png")


@dataclass(frozen=True)
class CardFacts:
    """What a card says.

    Attributes:
        config: of the run.
        model: with the best weights, in training form, as `load_model` gave it.
        run: what the run's folder says.
        outputs: of the model for validation images.
        validation: how many of these there are in all.
        scores: of each class.
        commands: to use the model.
        device: that it was looked at on.
    """

    config: TrainConfig
    model: nn.Module
    run: RunFacts
    outputs: Evaluation
    validation: int
    scores: Sequence[ClassScore]
    commands: Sequence[str]
    device: str = "cpu"


def card_text(facts: CardFacts, files: dict[str, str]) -> str:
    """The card; `files` are those of the run's folder, of which the pictures are shown."""
    name = facts.run.folder.resolve().name
    rows = "\n".join(f"| {key} | {value} |" for key, value in _rows(facts))
    pictures = "\n\n".join(f"![{files[file]}]({file})" for file in PICTURES if file in files)
    most = f" (the {MOST_CLASSES} worst of {len(facts.scores)})" if len(facts.scores) > MOST_CLASSES else ""
    commands = "\n".join(facts.commands)
    return (
        f"# {name}\n\n| | |\n| --- | --- |\n{rows}\n\n"
        f"## Use\n\n```bash\n{commands}\n```\n\n"
        f"## Classes{most}\n\n{class_table(facts.scores, MOST_CLASSES, markdown=True)}\n\n"
        f"## Pictures\n\n{pictures or 'None were drawn.'}\n\n"
        f"## Limits\n\n{_limits(facts)}\n\n"
        f"{measured_line(machine_facts(facts.device))}\n"
    )


def _rows(facts: CardFacts):
    config, card, run = facts.config, facts.model.card, facts.run
    size = sum(parameter.numel() for parameter in facts.model.parameters())
    yield "model", f"{card.model}, {size / 1e6:.2f} M parameters, {card.num_classes} classes"
    yield "images", card.describe_transform()
    yield "data", f"{config.data.root or config.data.source} ({config.data.source})"
    yield "started from", config.init or "scratch"
    yield "trained", f"{config.schedule.epochs} epochs, global batch {config.global_batch}, seed {config.seed}"
    yield "time", duration(run.seconds)
    count = len(facts.outputs.labels)
    part = "" if count == facts.validation else f" of {facts.validation:,}, equally many of each class"
    yield "top-1", f"{top(facts.outputs, 1):.2f} % of {count:,} validation images{part}"
    if card.num_classes > 5:
        yield "top-5", f"{top(facts.outputs, 5):.2f} %"
    if run.best:
        yield "best epoch", f"{run.best['epoch']:g} of {config.schedule.epochs}"
    yield "configuration", "[config.yaml](config.yaml), which trains the same again"


def _limits(facts: CardFacts) -> str:
    few = [score for score in facts.scores if score.images < 20]
    lines = [
        "- The validation images also chose the best epoch, so new pictures of the same kind may do slightly worse.",
        "- Pictures of another kind (other cameras, places, years) were not tried.",
        "- Every picture gets one of these classes, also one that shows none of them.",
    ]
    if few:
        lines.append(
            f"- {len(few)} of the classes have fewer than 20 validation images: their accuracy is a rough guess."
        )
    return "\n".join(lines)
