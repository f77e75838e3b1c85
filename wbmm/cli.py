"""The `wbmm` command: a table of subcommands, each a module with `add_arguments(parser)` and `run(args)`."""

import argparse
import difflib
import importlib
import re
import sys
from typing import NoReturn

from .handler import run_command
from .version import __version__

COMMANDS = {
    "list": ("wbmm.commands.list", "the family: parameters, FLOPs, the paper's figures, weights"),
    "info": ("wbmm.commands.info", "one model, stage by stage"),
    "doctor": ("wbmm.commands.doctor", "versions, usable backends and extras, and what to install for the rest"),
    "train": ("wbmm.commands.train", "train a model, on your own pictures or from a configuration"),
    "train-seg": ("wbmm.mm.own.seg", "train a segmentor on your own images and masks"),
    "train-det": ("wbmm.mm.own.det", "train a detector on your own annotations in COCO's format"),
    "runs": ("wbmm.train.runs", "compare training runs"),
    "reparam": ("wbmm.commands.reparam", "a checkpoint to its fused inference form"),
    "export": (
        "wbmm.commands.export",
        "a checkpoint to ONNX, OpenVINO or torch.export, checked in its own runtime",
    ),
    "quantize": ("wbmm.commands.quantize", "a checkpoint to INT8 or half precision, with accuracy and latency"),
    "predict": ("wbmm.deploy.predict", "classes of images, from any form of a model file"),
    "eval": ("wbmm.deploy.evaluate", "accuracy on a labelled folder, of any form of a model file"),
    "segment": ("wbmm.mm.segment", "pictures with the classes of their pixels in colour, and a legend"),
    "detect": ("wbmm.mm.detect", "pictures with boxes, masks, labels and scores; COCO's results in JSON"),
    "app": ("wbmm.commands.app", "a local web page to drop pictures on a classifier, segmentor or detector"),
    "analyze": ("wbmm.analysis", "what a model learned: tables, receptive fields, maps, mistakes"),
    "bench": ("wbmm.bench", "speed of models, side by side in one run"),
    "table": ("wbmm.tables.table", "a table of the paper: its rows built, counted, timed and, when asked, trained"),
    "demo": ("wbmm.commands.demo", "the main job end to end, on this machine"),
}


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        ["usage: wbmm COMMAND ...", "", *lines, "", "wbmm COMMAND --help shows its arguments and an example."]
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command; see `run_command` for how errors end."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"wbmm {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        print(f"wbmm: unknown command {name!r}; expected one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return run_command(f"wbmm {name}", lambda: _run(name, rest))


class _Parser(argparse.ArgumentParser):
    """With the nearest option in the error about an unknown one."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        near = difflib.get_close_matches(unknown[1], self._option_string_actions, n=1) if unknown else []
        super().error(f"{message}; did you mean {near[0]}?" if near else message)


def _run(name: str, rest: list[str]) -> int:
    module_name, summary = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = _Parser(
        allow_abbrev=False,
        prog=f"wbmm {name}",
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {module.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    # So that options may stand between arguments, as in `wbmm export IN --format onnx OUT`; not with subcommands.
    nested = any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)
    return module.run(parser.parse_args(rest) if nested else parser.parse_intermixed_args(rest))
