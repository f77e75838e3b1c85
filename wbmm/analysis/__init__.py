"""`wbmm analyze`: what a model learned, in numbers and pictures: tables, receptive fields, feature maps, mistakes."""

import argparse

from wbmm.handler import add_kinds, run_kind

__all__ = ["ANALYSES", "EXAMPLE", "add_arguments", "run"]

ANALYSES = {
    "weights": ("wbmm.analysis.weights", "what the WBMM layers learned: locality, orientation, frequency"),
    "erf": ("wbmm.analysis.erf", "effective receptive fields of models side by side"),
    "cam": ("wbmm.analysis.cam", "where a classifier looks (Grad-CAM)"),
    "features": ("wbmm.analysis.features", "the map of each stage as a picture; seams at window borders, measured"),
    "mistakes": ("wbmm.analysis.mistakes", "confusion matrix, accuracy of each class, the surest mistakes"),
}
EXAMPLE = "wbmm analyze weights wbmm_a.tiny50 --out analysis"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kinds(parser, ANALYSES)


def run(args: argparse.Namespace) -> int:
    return run_kind(args, ANALYSES)
