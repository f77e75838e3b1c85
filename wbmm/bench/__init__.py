"""`wbmm bench`: speed of operators, models and training, as ratios from one interleaved run."""

import argparse

from wbmm.handler import add_kinds, run_kind

__all__ = ["BENCHES", "EXAMPLE", "add_arguments", "run"]

BENCHES = {
    "op": ("wbmm.bench.operators", "the operator against depthwise convolutions, as in the paper's table"),
    "model": ("wbmm.bench.inference", "inference of whole models; the paper's tables with --preset paper or edge"),
    "train": ("wbmm.bench.training", "training steps and their memory; the paper's with --preset paper"),
    "peers": ("wbmm.bench.peers", "the family and timm's nets: throughput against published top-1, with a picture"),
    "runtime": ("wbmm.bench.runtime", "models in PyTorch, ONNX Runtime and OpenVINO, in float32, bf16 and INT8"),
    "paths": ("wbmm.bench.paths", "two ways to compute the same operator, by shape"),
    "profile": ("wbmm.bench.operator_times", "where the time of a model goes, by operator"),
    "seg": ("wbmm.bench.segmentors", "whole UPerNet segmentors: throughput, parameters, FLOPs"),
    "det": ("wbmm.bench.detectors", "whole Cascade Mask R-CNN detectors: throughput, parameters, FLOPs"),
    "memory": ("wbmm.bench.memory", "peak memory in inference and in a training step"),
    "report": ("wbmm.bench.report", "the logs of these as one page, the paper's figures beside ours"),
    "roofline": ("wbmm.bench.roofline", "bytes and multiply-adds at a GPU's limits; computed"),
}
EXAMPLE = "wbmm bench model wbmm_t:compact convnext_tiny --batch 1 16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kinds(parser, BENCHES)


def run(args: argparse.Namespace) -> int:
    return run_kind(args, BENCHES)
