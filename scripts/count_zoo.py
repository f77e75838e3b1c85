"""Counts parameters and FLOPs of the zoo. Run it after a change in wbmm/zoo.yaml; then run tools/make_zoo.py.

python scripts/count_zoo.py                 # models, into wbmm/zoo_counts.yaml, which `wbmm list` reads
python scripts/count_zoo.py --downstream    # segmentors and detectors, into wbmm/downstream_counts.yaml; needs mm
"""

import argparse
from pathlib import Path

import torch
import yaml

from wbmm.bench.detectors import SIZE, OnFixedRois
from wbmm.bench.segmentors import COST_SIZE
from wbmm.models.costs import build_on_meta, count_macs, count_params
from wbmm.models.fuse import fuse
from wbmm.zoo import Downstream, load_downstream, load_zoo

PACKAGE = Path(__file__).parents[1] / "wbmm"
COUNTS, DOWNSTREAM = PACKAGE / "zoo_counts.yaml", PACKAGE / "downstream_counts.yaml"
HEADER = """\
# Written by scripts/count_zoo.py from zoo.yaml. params: of the training form. params_fused: of the compact fused form.
# macs: multiply-adds of the fused form for one image of 224x224.
"""
DOWNSTREAM_HEADER = """\
# Written by scripts/count_zoo.py --downstream from zoo.yaml. Whole models, auxiliary head included in the parameters.
# macs: multiply-adds of the fused form for one image: 512x2048 for UPerNet; 800x1280 for Cascade Mask R-CNN, with as
# many RoIs as in testing.
"""


def count(name: str) -> dict[str, int]:
    net = build_on_meta(name)
    fused = fuse(net)
    return {
        "params": count_params(net),
        "params_fused": count_params(fused),
        "macs": count_macs(fused, (224, 224))[""],
    }


def count_downstream(model: Downstream) -> dict[str, int]:
    from wbmm.mm.networks import build_detector, build_segmentor, load_mm_config

    segments = model.task == "segmentation"
    config = load_mm_config(PACKAGE.parent / model.config, task=model.task)
    if "sync_bn" in config.model.backbone:
        config.model.backbone.sync_bn = False
    with torch.device("meta"):
        net = (build_segmentor if segments else build_detector)(config)
        counts = {"params": count_params(net), "params_fused": count_params(fuse(net))}
        if not segments and "cascade" not in model.name:
            return counts
        fused = fuse(net if segments else OnFixedRois(net).eval())
    return {**counts, "macs": count_macs(fused, COST_SIZE if segments else SIZE)[""]}


def write(path: Path, header: str, counts: dict) -> None:
    path.write_text(header + yaml.safe_dump(counts, sort_keys=False, default_flow_style=None), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Counts parameters and FLOPs of the zoo.")
    parser.add_argument("--downstream", action="store_true", help="segmentors and detectors instead of models")
    if parser.parse_args().downstream:
        write(DOWNSTREAM, DOWNSTREAM_HEADER, {n: count_downstream(model) for n, model in load_downstream().items()})
    else:
        write(COUNTS, HEADER, {name: count(name) for name in load_zoo()})
