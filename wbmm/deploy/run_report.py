"""What a finished run leaves behind: pictures of its mistakes, its fused file, a model card, and the commands to go on.

It is made from the run's folder alone, so it can be made again: `finish_run("runs/photos")`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch.nn as nn

from wbmm.data.images import match_classes, no_more_than
from wbmm.data.sources import Source, open_source
from wbmm.io.atomic import write_text
from wbmm.io.card import form_of
from wbmm.io.files import load_model, run_checkpoint, save_model
from wbmm.machine import machine_facts, measured_line
from wbmm.models.fuse import fuse
from wbmm.text import counted, first_line, render_table
from wbmm.train.config import TrainConfig, load_config
from wbmm.train.console import duration
from wbmm.train.runs import RunFacts

from .confusion import (
    ClassScore,
    class_scores,
    class_table,
    confusion_matrix,
    draw_class_scores,
    draw_confusion,
    draw_mistakes,
    surest_mistakes,
    write_class_scores,
)
from .evaluate import Evaluation, collect, top
from .export import export_model
from .predict import class_names
from .runtime import torch_runner

__all__ = ["CARD_FILE", "EXPORTS", "FUSED_FILE", "CardFacts", "RunReport", "card_text", "finish_run"]

CARD_FILE = "model_card.md"
MOST_CLASSES = 50  # in the table
PICTURES = ("curves.png", "confusion.png", "classes.png", "mistakes.png", "train_batch.png")
FUSED_FILE, PLAIN_FILE = "fused.safetensors", "model.safetensors"
EXPORTS = {"onnx": "model.onnx", "openvino": "model.xml"}
MOST_IMAGES = 10_000  # that the mistakes are looked for in; a larger set is not read a second time in full
MOST_MISTAKES = 24
MADE_BY_TRAINING = {
    "train_batch.png": "the first training images as the net saw them",
    "curves.png": "loss and accuracy",
}


@dataclass
class RunReport:
    """The files of a run, and what could not be made.

    Attributes:
        out: the run's folder.
        files: name of a file in it, and what it is.
        commands: to use them.
        missing: what was left out, and why.
    """

    out: Path
    files: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def make(self, name: str, what: str, work: Callable[[], object]) -> None:
        """Makes a file; what goes wrong is a line of the report and no reason to fail after hours of training."""
        try:
            work()
        except (ImportError, ValueError, OSError) as error:
            self.missing.append(f"{name}: {first_line(error)}")
        else:
            self.files[name] = what

    def describe(self) -> str:
        """The files as a table, what is missing, and the commands."""
        rows = [(str(self.out / name), what) for name, what in self.files.items()]
        parts = [render_table(("file", ""), rows)]
        parts += ["left out:\n" + "\n".join(f"  {line}" for line in self.missing)] if self.missing else []
        return "\n\n".join([*parts, "to go on:\n" + "\n".join(f"  {command}" for command in self.commands)])


def finish_run(out: str | Path, export: str | None = None, workers: int = 0, device: str = "cpu") -> RunReport:
    """Looks at what the best weights of a run get wrong and writes what is needed to use them.

    Args:
        out: the folder of a run that has ended.
        export: one of `EXPORTS`, for a file for that runtime.
        workers: processes that read images.
        device: where the validation images are looked at.
    """
    report = RunReport(Path(out))
    config = load_config(report.out / "config.yaml")
    report.files |= {name: what for name, what in MADE_BY_TRAINING.items() if (report.out / name).is_file()}
    model = load_model(run_checkpoint(out))
    fused = fuse(model)
    training, source = (open_source(config.data, train=train) for train in (True, False))
    source = match_classes(model.card, source)
    part = no_more_than(source, MOST_IMAGES)
    skip = config.data.on_bad_image == "skip"
    outputs = collect(
        torch_runner(fused, model.card, device), part, config.batch, workers, skip, "looking for mistakes"
    )
    names = class_names(model.card)
    matrix = confusion_matrix(outputs.labels, outputs.logits.argmax(1), len(names))
    scores = class_scores(matrix, names)
    _draw(report, outputs, matrix, scores, part)
    fusible = form_of(fused) != "training"  # some of timm's models have nothing to fuse
    file, what = (FUSED_FILE, "the best weights, fused") if fusible else (PLAIN_FILE, "the best weights")
    report.make(file, what, lambda: save_model(fused.cpu(), report.out / file, force=True))
    if export:
        _export(report, model, export)
    report.commands = _commands(report.out, file, export)
    facts = CardFacts(
        config, model, RunFacts(out), outputs, len(training), len(source), scores, report.commands, device
    )
    report.make(CARD_FILE, "the model card", lambda: write_text(report.out / CARD_FILE, card_text(facts, report.files)))
    return report


def _draw(report: RunReport, outputs: Evaluation, matrix: np.ndarray, scores: list[ClassScore], source: Source) -> None:
    probabilities, labels = outputs.logits.softmax(1).numpy(), outputs.labels.numpy()
    names = [score.name for score in scores]
    out, run = report.out, report.out.resolve().name
    wrong = surest_mistakes(probabilities, labels, MOST_MISTAKES)
    report.make("classes.csv", "accuracy of each class", lambda: write_class_scores(scores, out / "classes.csv"))
    report.make("classes.png", "the same, drawn", lambda: draw_class_scores(scores, out / "classes.png"))
    report.make(
        "confusion.png", "what is taken for what", lambda: draw_confusion(matrix, names, out / "confusion.png", run)
    )
    if not wrong:
        (out / "mistakes.png").unlink(missing_ok=True)
        report.missing.append("mistakes.png: there is no mistake on the validation images")
        return
    count = int(matrix.sum() - matrix.trace())
    title = f"{run}: the {len(wrong)} surest of {count:,} mistakes" if count > len(wrong) else f"{run}: all mistakes"

    def image(index: int):
        return source.image(outputs.indices[index])

    report.make(
        "mistakes.png", "the surest mistakes", lambda: draw_mistakes(wrong, image, names, out / "mistakes.png", title)
    )


def _export(report: RunReport, model, export: str) -> None:
    path = report.out / EXPORTS[export]
    what = f"for {'ONNX Runtime' if export == 'onnx' else 'OpenVINO'}, any batch size"
    report.make(path.name, what, lambda: export_model(model, path, model.card, dynamic_batch=True, force=True))


def _commands(out: Path, file: str, export: str | None) -> list[str]:
    exported = out / EXPORTS[export] if export else out / "model.onnx"
    return [
        f"wbmm predict {out} PICTURES",
        f"wbmm eval {out}",
        f"wbmm predict {exported} PICTURES" if export else f"wbmm export {out} {exported} --dynamic-batch",
        f"wbmm train {out}/config.yaml out={out}-again",
        f'python -c "import wbmm; model = wbmm.load_model({str(out / file)!r})"',
    ]


@dataclass(frozen=True)
class CardFacts:
    """What a card says.

    Attributes:
        config: of the run.
        model: with the best weights, in training form, as `load_model` gave it.
        run: what the run's folder says.
        outputs: of the model for validation images.
        training, validation: how many images each set has in all.
        scores: of each class.
        commands: to use the model.
        device: that it was looked at on.
    """

    config: TrainConfig
    model: nn.Module
    run: RunFacts
    outputs: Evaluation
    training: int
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
    sets = f"{facts.training:,} training and {facts.validation:,} validation images"
    yield "data", f"{config.data.root or config.data.source}, {sets}"
    yield "started from", config.init or "scratch"
    epochs = counted(config.schedule.epochs, "epoch")
    yield "trained", f"{epochs}, global batch {config.global_batch}, seed {config.seed}"
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
