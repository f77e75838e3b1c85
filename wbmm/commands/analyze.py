"""`wbmm analyze`: what to look at is its first argument."""

import argparse
import importlib

ANALYSES = {
    "weights": ("wbmm.analysis.weights", "what the WBMM layers learned: locality, orientation, frequency"),
    "erf": ("wbmm.analysis.erf", "effective receptive fields of models side by side"),
    "cam": ("wbmm.analysis.cam", "where a classifier looks (Grad-CAM)"),
    "features": ("wbmm.analysis.features", "the map of each stage as a picture; seams at window borders, measured"),
    "mistakes": ("wbmm.analysis.mistakes", "confusion matrix, accuracy of each class, the surest mistakes"),
}
EXAMPLE = "wbmm analyze weights wbmm_a.tiny50 --out analysis"


class AnalysisParser(argparse.ArgumentParser):
    """Imports its analysis, with torch, only when that is the one asked for."""

    def parse_known_args(self, args=None, namespace=None):
        module = importlib.import_module(ANALYSES[self.prog.split()[-1]][0])
        self.description, self.epilog = module.__doc__, f"example:\n  {module.EXAMPLE}"
        module.add_arguments(self)
        return super().parse_known_args(args, namespace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(
        dest="analysis", required=True, metavar="{" + ",".join(ANALYSES) + "}", parser_class=AnalysisParser
    )
    for name, (_, summary) in ANALYSES.items():
        kinds.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)


def run(args: argparse.Namespace) -> int:
    return importlib.import_module(ANALYSES[args.analysis][0]).run(args)
