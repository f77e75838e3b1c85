"""Data workers of a killed run end with it."""

import os
import subprocess
import sys

import pytest

from tests.mm import objects, shapes
from tests.mm.helpers import ROOT
from tests.orphans import kill_and_count_orphans

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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("extra", ["seg", "det"])
def test_no_worker_outlives_a_killed_run(tmp_path, extra):
    """Without `end_with_parent` in the runner's workers both of them stay, asleep."""
    pytest.importorskip({"seg": "mmseg", "det": "mmdet"}[extra])
    if extra == "seg":
        config = shapes.write_config(tmp_path / "tiny.py", shapes.write_shapes(tmp_path / "data"), iterations=10**4)
    else:  # many pictures: in the middle of an epoch
        config = objects.write_config(tmp_path / "tiny.py", objects.write_objects(tmp_path / "data", train=64))
    config.write_text(config.read_text() + CHANGES)
    (tmp_path / "ballast.py").write_text(BALLAST)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / f"train_{extra}.py"), str(config), "--work-dir", str(tmp_path / "run")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert kill_and_count_orphans(process, workers=2) == 0
