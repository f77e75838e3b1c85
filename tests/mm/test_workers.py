"""Data workers of a killed run end with it."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("mmseg")

from tests.mm import shapes
from tests.mm.helpers import ROOT
from tests.orphans import kill_and_count_orphans
from wbmm.mm import runner

# Batches too large for a pipe: the workers wait in the middle of handing one over.
BALLAST = """
from mmengine.registry import TRANSFORMS

@TRANSFORMS.register_module()
class Ballast:
    def __call__(self, results):
        results["data_samples"].set_metainfo(dict(ballast=bytes(1 << 20)))
        return results
"""
CHANGES = """
custom_imports = dict(imports=["wbmm.mm.register", "ballast"], allow_failed_imports=False)
train_dataloader.update(num_workers=2, persistent_workers=True)
train_dataloader["dataset"]["pipeline"] = train_pipeline + [dict(type="Ballast")]
"""


def test_every_worker_watches_its_parent(monkeypatch):
    """Segmentors and detectors have one runner. In a detector's run workers would rarely be caught while they wait."""
    called = []
    monkeypatch.setattr(runner, "end_with_parent", lambda: called.append(True))
    sampler = {"type": "DefaultSampler", "shuffle": False}
    loader = runner.MMRunner.build_dataloader({"batch_size": 1, "num_workers": 1, "dataset": [0], "sampler": sampler})
    loader.worker_init_fn(0)
    assert called


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_no_worker_outlives_a_killed_run(tmp_path):
    config = shapes.write_config(tmp_path / "tiny.py", shapes.write_shapes(tmp_path / "data"), iterations=10**4)
    config.write_text(config.read_text() + CHANGES)
    (tmp_path / "ballast.py").write_text(BALLAST)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "train_seg.py"), str(config), "--work-dir", str(tmp_path / "run")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert kill_and_count_orphans(process, workers=2) == 0
