"""Counts every model of wbmm/zoo.yaml into wbmm/zoo_counts.yaml, from which `wbmm list` reads. Run it after a change.

python scripts/count_zoo.py
"""

from pathlib import Path

import yaml

from wbmm.models.fuse import fuse
from wbmm.models.profile import build_on_meta, count_macs, count_params
from wbmm.zoo import load_zoo

COUNTS = Path(__file__).parents[1] / "wbmm" / "zoo_counts.yaml"
HEADER = """\
# Written by scripts/count_zoo.py from zoo.yaml. params: of the training form. params_fused: of the compact fused form.
# macs: multiply-adds of the fused form for one image of 224x224.
"""


def count(name: str) -> dict[str, int]:
    net = build_on_meta(name)
    fused = fuse(net)
    return {
        "params": count_params(net),
        "params_fused": count_params(fused),
        "macs": count_macs(fused, (224, 224))[""],
    }


if __name__ == "__main__":
    counts = {name: count(name) for name in load_zoo()}
    COUNTS.write_text(HEADER + yaml.safe_dump(counts, sort_keys=False, default_flow_style=None), encoding="utf-8")
