"""`wbmm analyze mistakes`: confusion matrix, accuracy of each class, and the mistakes that a model was surest of."""

import argparse
from pathlib import Path

from wbmm.data.images import match_classes, no_more_than, open_labelled
from wbmm.deploy.confusion import (
    class_scores,
    class_table,
    confusion_matrix,
    draw_class_scores,
    draw_confusion,
    draw_mistakes,
    surest_mistakes,
    write_class_scores,
)
from wbmm.deploy.evaluate import add_data_arguments, classifier, collect, top
from wbmm.deploy.predict import class_names
from wbmm.deploy.runtime import open_runner

from .output import Output, add_output_arguments

__all__ = ["EXAMPLE", "add_arguments", "run"]

EXAMPLE = "wbmm analyze mistakes runs/digits --source digits --out analysis"
WORST = 15  # classes of the table on a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="MODEL", help="a run's folder, any model file, or a name with weights")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder with the split folders or class folders")
    add_data_arguments(parser)
    parser.add_argument("--limit", type=int, metavar="N", help="so many images, equally many of each class")
    parser.add_argument("--most", type=int, default=24, metavar="N", help="mistakes that are drawn (default: 24)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="the model's name, where the file does not tell")
    parser.add_argument("--no-ema", dest="ema", action="store_false", help="the weights themselves, not their average")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    for name in ("most", "batch"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: give 1 or more")
    runner = classifier(open_runner(args.file, args.device, args.model, args.ema), args.file)
    data = match_classes(runner.card, open_labelled(runner.card, args.data, args.source, args.split))
    data = no_more_than(data, args.limit)
    output = Output(args, "mistakes")
    found = collect(runner, data, args.batch, args.workers, args.skip_bad, "images")
    if found.skipped:
        raise ValueError(f"{found.skipped} images could not be read: remove them, for pictures go by their number")
    names, chances = class_names(runner.card), found.logits.softmax(1).numpy()
    matrix = confusion_matrix(found.labels.numpy(), chances.argmax(1), len(names))
    scores, mistakes = class_scores(matrix, names), surest_mistakes(chances, found.labels.numpy(), args.most)
    accuracy = top(found, 1)
    print(f"{args.file}: {accuracy:.2f} % of {len(found.labels)} images right\n\n{class_table(scores, WORST)}")
    name = Path(args.file).name
    for ending in output.endings:
        place = lambda part, ending=ending: args.out / f"mistakes-{part}.{ending}"  # noqa: E731
        output.written.append(draw_confusion(matrix, names, place("confusion"), name))
        output.written.append(draw_class_scores(scores, place("classes"), name))
        if mistakes:
            output.written.append(draw_mistakes(mistakes, data.image, names, place("surest")))
    write_class_scores(scores, args.out / "mistakes-classes.csv")
    facts = {
        "model": name,
        "card": runner.card.describe(),
        "images": len(found.labels),
        "top1": accuracy,
        "classes": names,
        "confusion": matrix.tolist(),
        "surest": [
            {"image": data.name(m.index), "is": names[m.label], "taken_for": names[m.predicted], "sure": m.probability}
            for m in mistakes
        ],
    }
    surest = "![the surest mistakes](mistakes-surest.png)" if mistakes else "No mistake was made."
    page = [
        f"# What {name} gets wrong",
        f"{runner.card.describe()}: {accuracy:.2f} % of {len(found.labels)} images right.",
        "## The surest mistakes",
        surest,
        "## Confusion",
        "![confusion matrix](mistakes-confusion.png)",
        "## Accuracy of each class",
        "![accuracy of each class](mistakes-classes.png)",
        class_table(scores, markdown=True),
    ]
    output.finish(facts, "\n\n".join(page), args.device)
    return 0
