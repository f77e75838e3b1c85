"""`wbmm app`: a local web page to drop pictures on a classifier, segmentor or detector."""

import argparse
import os
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from wbmm.data.sources import BadImage, FileSource
from wbmm.deploy.evaluate import classifier
from wbmm.deploy.predict import class_names
from wbmm.deploy.runtime import EXPORTED, open_runner
from wbmm.extras import need
from wbmm.io.files import SUFFIXES, run_checkpoint
from wbmm.io.reader import read_checkpoint
from wbmm.mm.detect import open_photo_detector
from wbmm.mm.pictures import draw_classes, draw_objects
from wbmm.mm.segment import open_photo_segmenter
from wbmm.text import printable

__all__ = ["EXAMPLE", "Tool", "add_arguments", "build_page", "launch", "open_tool", "run"]

EXAMPLE = "wbmm app wbmm_a.tiny50"
HOST = "127.0.0.1"  # this machine alone
HEIGHT = 400  # of pictures on the page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a run's folder, a checkpoint, .onnx, .xml, .pt2, or a name with weights"
    )
    parser.add_argument("--config", type=Path, help="of a segmentor's or detector's checkpoint (default: beside it)")
    parser.add_argument("--port", type=int, help="of the page (default: the first free one from 7860 on)")
    parser.add_argument("--topk", type=int, default=5, help="classes that are shown (default: 5)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="the model's name, where the file does not tell")
    parser.add_argument("--no-ema", dest="ema", action="store_false", help="the weights themselves, not their average")


@dataclass(frozen=True)
class Tool:
    """A model behind the page.

    Attributes:
        kind: classifier, segmentor or detector.
        what: one line about it.
        look: from a picture (and, but for classifiers, the slider's number) to a name's probability, or to a picture
            and a line about it.
        slider: of segmentors and detectors, what the number is and its first value.
    """

    kind: str
    what: str
    look: Callable
    slider: tuple[str, float] | None = None


def open_tool(
    file: str, config: Path | None = None, device: str = "cpu", model: str | None = None, ema: bool = True
) -> Tool:
    """The model of a file, whatever kind it is of.

    Args:
        file: a run's folder, any model file, or a name with published weights.
        config: of a segmentor's or detector's checkpoint; where none is given, the one .py file beside it.
        device: where it runs.
        model: its name, where a classifier's file does not tell.
        ema: a checkpoint's moving average, where it has one.
    """
    path = Path(file)
    if path.is_dir():
        path = _of_run(path)
    heads = _heads(path) if path.is_file() and path.suffix in SUFFIXES else set()
    if "backbone" in heads:
        config = config or _config_beside(path)
        if "decode_head" in heads:
            return _segmentor(open_photo_segmenter(str(path), config, device=device), path.name)
        return _detector(open_photo_detector(str(path), config, device=device), path.name)
    if config is not None:
        raise ValueError(f"--config is for the checkpoint of a segmentor or detector, which {path} is not")
    if path.is_file() and path.suffix not in (*SUFFIXES, *EXPORTED):
        known = ", ".join((*SUFFIXES, *EXPORTED))
        raise ValueError(f"{path}: no model file; give a run's folder or a file that ends with one of {known}")
    source = str(path) if path.is_file() else file
    runner = open_runner(source, device, model, ema)
    if runner.card.kind == "segmentor":
        return _segmentor(open_photo_segmenter(source, None, device=device), path.name)
    return _classifier(classifier(runner, file), path.name)


def _of_run(folder: Path) -> Path:
    """The checkpoint in a run's folder: the newest of mmengine's, or ours."""
    numbered = [path for kind in ("iter", "epoch") for path in folder.glob(f"{kind}_*.pth")]
    return max(numbered, key=lambda path: path.stat().st_mtime) if numbered else run_checkpoint(folder)


def _heads(path: Path) -> set[str]:
    """The first parts of the names of weights: `backbone` and `decode_head` of a segmentor."""
    contents = read_checkpoint(path).contents
    state_dict = contents.get("state_dict", contents) if isinstance(contents, dict) else {}
    return {str(key).partition(".")[0] for key in state_dict} if isinstance(state_dict, dict) else set()


def _config_beside(path: Path) -> Path:
    """mmengine leaves the configuration of a run in its folder. The text inside a checkpoint is not run."""
    found = sorted(path.parent.glob("*.py"))
    if len(found) == 1:
        return found[0]
    raise ValueError(f"{path}: the checkpoint of a segmentor or detector needs its configuration (--config FILE)")


def _classifier(runner, name: str) -> Tool:
    names, transform = class_names(runner.card), runner.card.transform()
    twice = {text for text, count in Counter(names).items() if count > 1}
    names = [f"{text} ({number})" if text in twice else text for number, text in enumerate(names)]

    def look(image: Image.Image) -> dict[str, float]:
        chances = runner(transform(image)[None]).float().cpu().softmax(1)[0].tolist()
        return dict(zip(names, chances, strict=True))

    return Tool("classifier", f"{name}: {runner.card.describe()}, {runner.name}", look)


def _segmentor(segmenter, name: str) -> Tool:
    def look(image: Image.Image, opacity: float) -> tuple[Image.Image, str]:
        image = ImageOps.exif_transpose(image).convert("RGB")
        labels = segmenter.labels(image)
        shares = np.bincount(labels.ravel(), minlength=len(segmenter.classes)) / labels.size
        best = [n for n in np.argsort(-shares)[:5] if shares[n] >= 0.005]
        text = ", ".join(f"{segmenter.classes[n]} {100 * shares[n]:.0f} %" for n in best)
        return draw_classes(image, labels, segmenter.classes, segmenter.colours, opacity), text

    what = f"{name}: a segmentor of {len(segmenter.classes)} classes"
    return Tool("segmentor", what, look, ("opacity of the colours", 0.6))


def _detector(detector, name: str) -> Tool:
    classes = list(map(printable, detector.classes))

    def look(image: Image.Image, score: float) -> tuple[Image.Image, str]:
        image = ImageOps.exif_transpose(image).convert("RGB")
        found = detector.find(image).above(score)
        texts = [f"{classes[n]} {s:.2f}" for n, s in zip(found.labels, found.scores, strict=True)]
        counts = Counter(classes[n] for n in found.labels).most_common()
        picture = draw_objects(image, found.boxes, texts, detector.colours[found.labels], found.masks)
        return picture, ", ".join(f"{count} {name}" for name, count in counts) or "nothing above this score"

    return Tool("detector", f"{name}: a detector of {len(classes)} classes", look, ("least score", 0.3))


def build_page(tool: Tool, topk: int = 5):
    """The page as Gradio's Blocks: a picture in, classes or a picture out."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    gradio = need("gradio", "wbmm app")

    def answer(path: str | None, *number: float):
        if path is None:
            return None if tool.slider is None else (None, "")
        try:
            return tool.look(FileSource([path]).image(0), *number)
        except (BadImage, ValueError) as error:
            raise gradio.Error(printable(error)) from None

    with gradio.Blocks(title=f"wbmm: {tool.kind}", analytics_enabled=False) as page:
        gradio.Markdown(f"## {tool.kind.capitalize()}\n`{tool.what}`")
        with gradio.Row():
            given = gradio.Image(
                type="filepath",
                sources=["upload", "clipboard"],
                label="drop a picture here",
                height=HEIGHT,
                buttons=["fullscreen"],
            )
            with gradio.Column():
                if tool.slider is None:
                    inputs, outputs = [given], [gradio.Label(num_top_classes=topk, label="classes")]
                else:
                    buttons = ["download", "fullscreen"]  # and none that uploads the picture to share it
                    result = gradio.Image(type="pil", format="png", label="result", height=HEIGHT, buttons=buttons)
                    outputs = [result, gradio.Textbox(label="found")]
                    name, first = tool.slider
                    inputs = [given, gradio.Slider(0, 1, first, step=0.05, label=name)]
        for trigger in inputs:
            trigger.change(answer, inputs, outputs)
    return page


def launch(page, port: int | None = None) -> str:
    """Serves a page on this machine and gives its address."""
    gradio = need("gradio", "wbmm app")
    theme = gradio.themes.Default(font=["sans-serif"], font_mono=["monospace"])  # the usual ones come from the web
    try:
        _, address, _ = page.launch(
            server_name=HOST,
            server_port=port,
            share=False,
            prevent_thread_lock=True,
            quiet=True,
            ssr_mode=False,
            enable_monitoring=False,
            footer_links=[],
            theme=theme,
        )
    except OSError:
        where = f"port {port} is" if port else "ports 7860 to 7959 are"
        raise ValueError(f"cannot serve the page: {where} in use; give another --port") from None
    return address


def run(args: argparse.Namespace) -> int:
    if args.topk < 1:
        raise ValueError(f"--topk {args.topk}: give 1 or more")
    if args.port is not None and not 1 <= args.port <= 65535:
        raise ValueError(f"--port {args.port}: give 1 to 65535")
    need("gradio", "wbmm app")
    tool = open_tool(args.file, args.config, args.device, args.model, args.ema)
    with tempfile.TemporaryDirectory(prefix="wbmm-app-") as folder:  # of dropped pictures, gone at the end
        os.environ["GRADIO_TEMP_DIR"] = folder
        page = build_page(tool, args.topk)
        address = launch(page, args.port)
        print(f"{tool.what}\n{address}  (this machine alone; Ctrl-C ends it)", flush=True)
        stop = threading.Event()
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, lambda *_: stop.set())
        stop.wait()
        page.close(verbose=False)
    return 0
