"""configs/ablations: the files are what the tables say, and each one loads and builds."""

from pathlib import Path

import pytest
import timm
import torch

import wbmm
from tests.helpers import randomize
from wbmm.models.profile import build_on_meta
from wbmm.tables.configs import HEADER, ablation_files, write_ablations
from wbmm.train.config import load_config

FOLDER = Path(__file__).parents[2] / "configs" / "ablations"
FILES = ablation_files()


def test_the_files_are_what_the_tables_say():
    found = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.suffix in (".yaml", ".py")}
    assert found == {*FILES, "fashion_mnist/_base.yaml"}, "run: python tools/write_ablations.py"
    wrong = [name for name, text in FILES.items() if (FOLDER / name).read_text(encoding="utf-8") != text]
    assert wrong == [], "run: python tools/write_ablations.py"


def test_writing_removes_what_is_gone_and_nothing_else(tmp_path):
    assert len(write_ablations(tmp_path)) == len(FILES)
    (tmp_path / "imagenet" / "gone.yaml").write_text(f"{HEADER}base: x.yaml\n")
    (tmp_path / "imagenet" / "_base.yaml").write_text("seed: 1\n")
    assert write_ablations(tmp_path) == [tmp_path / "imagenet" / "gone.yaml"]
    assert write_ablations(tmp_path) == []
    assert (tmp_path / "imagenet" / "_base.yaml").is_file()


def test_every_imagenet_file_builds_its_model():
    names = [name for name in FILES if name.startswith("imagenet")]
    assert len(names) > 40
    for name in names:
        cfg = load_config(FOLDER / name)
        args = {key: value for key, value in cfg.model.args.items() if key != "large_kernel"}
        assert cfg.out == f"runs/ablations/{name.removesuffix('.yaml')}"
        assert cfg.data.num_classes == 1000
        assert cfg.model.drop_path > 0
        assert next(build_on_meta(cfg.model.name, **args).parameters()).is_meta


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("fashion_mnist")])
def test_every_row_fuses_to_what_it_was(name):
    """Its small net, narrowed, in float64: real values through both forms."""
    cfg = load_config(FOLDER / name)
    assert cfg.out == f"runs/ablations/{name.removesuffix('.yaml')}"
    narrow = {"dims": (8, 16, 16, 24)} if "convnext" not in name else {"dims": (8, 8, 16, 16)}
    if cfg.model.args.get("mixer") == "win_attn":
        narrow = {}  # its heads have 40 channels
    net = timm.create_model(cfg.model.name, in_chans=1, num_classes=10, **{**cfg.model.args, **narrow})
    net = randomize(net).double().eval()
    images = torch.randn(2, 1, cfg.data.size, cfg.data.size, dtype=torch.float64)
    with torch.no_grad():
        out = net(images)
        assert out.std() > 0
        torch.testing.assert_close(wbmm.fuse(net)(images), out, rtol=1e-10, atol=1e-10)


def test_every_segmentation_file_builds_its_backbone():
    pytest.importorskip("mmseg")
    from mmengine.config import Config

    from tests.mm.helpers import on_meta
    from wbmm.mm.backbone import WBMMBackbone

    names = [name for name in FILES if name.endswith(".py")]
    assert {name.split("/")[1] for name in names} == {
        *("cross-operator", "feature-extraction", "patterns", "windows", "padding")
    }
    for name in names:
        cfg = Config.fromfile(FOLDER / name)
        assert cfg.model.type == "EncoderDecoder"
        assert cfg.model.backbone.init_cfg.checkpoint.endswith("/best.pt")
        options = {key: value for key, value in cfg.model.backbone.items() if key not in ("type", "large_kernel")}
        with on_meta():
            assert len(WBMMBackbone(**options).stages) == 4
