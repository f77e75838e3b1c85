"""Configurations by path, by name and as rows of the paper's tables."""

from collections import defaultdict
from pathlib import Path

import pytest
import timm
import torch

import wbmm
from tests.helpers import randomize
from wbmm.config_files import SMALL_RECIPES, find_config, resolve_config
from wbmm.models.costs import build_on_meta
from wbmm.paper_tables import load_tables
from wbmm.train.config import load_config, to_dict

ROOT = Path(__file__).parents[1]
ROWS = [(table, row) for table in load_tables().values() for row in table.rows]
IMAGENET = [f"table:{table.name}/{row.id}" for table, row in ROWS if row.recipe]
SMALL = [f"table:{table.name}/{row.id}@fashion_mnist" for table, row in ROWS if not row.large_kernel]
SEGMENTATION = [f"table:{table.name}/{row.id}" for table, row in ROWS if table.ade20k]
NARROW = {"convnext": {"dims": (8, 8, 16, 16)}, "": {"dims": (8, 16, 16, 24)}}


def different_nets(names):
    """One name for each net: many rows are the same net."""
    found = {}
    for name in names:
        _, changes = resolve_config(name)
        found.setdefault(repr(sorted(changes["model"].items())), name)
    return list(found.values())


@pytest.mark.parametrize("name", ["configs/digits.yaml", "digits.yaml", "digits", Path("configs/digits.yaml")])
def test_a_name_is_found_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == ROOT / "configs" / "digits.yaml"
    assert load_config(name).out == "runs/digits"


def test_a_file_here_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.yaml").write_text("seed: 7\n")
    assert find_config("digits.yaml") == find_config("digits") == Path("digits.yaml")
    assert find_config("configs/digits") == ROOT / "configs" / "digits.yaml"


def test_other_endings_are_other_configurations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "wbmm-t-hier_upernet_8xb2-160k_ade20k-512x512"
    assert find_config(f"ade20k/{name}", ".py") == ROOT / "configs" / "ade20k" / f"{name}.py"
    with pytest.raises(ValueError, match=f"did you mean ade20k/{name}"):
        find_config("configs/ade20k/wbmm-t-hier_upernet.py", ".py")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digit", "digit: there is no such configuration file; did you mean digits?"),
        ("imagenet/wbmm_q.yaml", "did you mean imagenet/wbmm_t or "),
        ("/etc/zzz.yaml", "/etc/zzz.yaml: there is no such configuration file; expected digits, fashion_mnist, "),
        ("table:window/hier", "table:window/hier: no table 'window'; did you mean windows?"),
        ("table:windows/heir", "table 'windows' has no row 'heir'; did you mean hier or hier-s3?"),
        ("table:windows", "table 'windows' has no row ''; expected w7, w14, w14-s4-7, hier, hier-s3"),
        ("table:windows/hier@fashion", "no recipe 'fashion'; did you mean fashion_mnist?"),
        ("table:padding/zeros", "table:padding/zeros has no ImageNet recipe"),
        ("table:cross-operator/dw13-lka@fashion_mnist", "makes no difference to what a net learns; train 'dw13'"),
    ],
)
def test_errors_name_the_nearest(name, message):
    with pytest.raises(ValueError) as error:
        resolve_config(name)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("table:convnext/convnext-t", "its rows are not for segmentation; a segmentor takes a row of cross-operator"),
        ("table:windows/hier@fashion_mnist", "recipe 'fashion_mnist' is for classification"),
    ],
)
def test_rows_that_are_not_for_segmentation(name, message):
    with pytest.raises(ValueError) as error:
        resolve_config(name, ".py")
    assert message in str(error.value)


def test_there_is_a_configuration_of_every_row():
    assert (len(IMAGENET), len(SMALL), len(SEGMENTATION)) == (48, 45, 31)


def test_a_row_is_its_recipe_with_its_model():
    config, recipe = to_dict(load_config("table:windows/w14")), to_dict(load_config("imagenet/wbmm_t_dense"))
    assert config["model"] == {**recipe["model"], "args": {"window_size": [14, 14, 14, 14]}}
    assert config["out"] == "runs/wbmm_t_dense-window_size-14-14-14-14"
    same = set(config) - {"model", "out"}
    assert {key: config[key] for key in same} == {key: recipe[key] for key in same}
    changed = load_config("table:convnext/convnext-t-wbmm", ["batch=64"])
    assert (changed.model.drop_path, changed.schedule.warmup_epochs, changed.batch) == (0.1, 20, 64)


def test_the_same_net_of_several_tables_is_one_run():
    """And one folder never holds two kinds of runs."""
    runs = defaultdict(list)
    for name in [*IMAGENET, *SMALL, *(f"imagenet/{path.stem}" for path in (ROOT / "configs/imagenet").glob("w*.yaml"))]:
        config = to_dict(load_config(name))
        runs[config.pop("out")].append((name, config))
    for out, found in runs.items():
        assert all(config == found[0][1] for _, config in found), out
    configs = [found[0][1] for found in runs.values()]
    assert all(config not in configs[:i] for i, config in enumerate(configs))
    assert [name for name, _ in runs["runs/wbmm_t_hier"]] == ["table:windows/hier", "imagenet/wbmm_t_hier"]
    pattern = "runs/wbmm_t-pattern-WWW-WWW-Wx18-WWW"
    assert [name for name, _ in runs[pattern]] == ["table:feature-extraction/wbmm", "table:patterns/www-www-ww-www"]


def test_a_row_has_the_net_that_its_table_says():
    """Whatever name it got: the same tensors, patterns and windows."""
    for table, row in ROWS:
        if not row.recipe or row.large_kernel:
            continue
        model = resolve_config(f"table:{table.name}/{row.id}")[1]["model"]
        if (model["name"], model["args"]) == (row.model, row.args):
            continue
        net, wanted = build_on_meta(model["name"], **model["args"]), build_on_meta(row.model, **row.args)
        assert [str(module) for module in net.stages] == [str(module) for module in wanted.stages]
        assert {k: v.shape for k, v in net.state_dict().items()} == {k: v.shape for k, v in wanted.state_dict().items()}


def test_every_imagenet_row_builds_its_model():
    for name in different_nets(IMAGENET):
        config = load_config(name)
        args = {key: value for key, value in config.model.args.items() if key != "large_kernel"}
        assert config.data.num_classes == 1000
        assert config.model.drop_path > 0
        assert next(build_on_meta(config.model.name, **args).parameters()).is_meta


@pytest.mark.parametrize("name", different_nets(SMALL))
def test_every_row_fuses_to_what_it_was(name):
    """Its small net, narrowed, in float64: real values through both forms."""
    config = load_config(name)
    assert config.data.args == load_config(SMALL_RECIPES["fashion_mnist"]).data.args
    narrow = NARROW["convnext" if "convnext" in config.model.name else ""]
    if config.model.args.get("mixer") == "win_attn":
        narrow = {}  # its heads have 40 channels
    net = timm.create_model(config.model.name, in_chans=1, num_classes=10, **{**config.model.args, **narrow})
    net = randomize(net).double().eval()
    images = torch.randn(2, 1, config.data.size, config.data.size, dtype=torch.float64)
    with torch.no_grad():
        out = net(images)
        assert out.std() > 0
        torch.testing.assert_close(wbmm.fuse(net)(images), out, rtol=1e-10, atol=1e-10)


def test_every_row_for_segmentation_builds_its_backbone():
    pytest.importorskip("mmseg")
    from tests.mm.helpers import on_meta
    from wbmm.mm.backbone import WBMMBackbone
    from wbmm.mm.networks import load_mm_config

    assert {name.removeprefix("table:").split("/")[0] for name in SEGMENTATION} == {
        *("cross-operator", "feature-extraction", "patterns", "windows", "padding")
    }
    for name in SEGMENTATION:
        config = load_mm_config(name)
        assert config.model.type == "EncoderDecoder"
        assert config.work_dir.endswith("_upernet_8xb2-160k_ade20k-512x512")
        started_from = config.model.backbone.init_cfg.checkpoint
        if name in IMAGENET:
            assert started_from == f"{resolve_config(name)[1]['out']}/best.pt"
        else:
            assert started_from == "runs/wbmm_t_hier/best.pt"
        options = {key: value for key, value in config.model.backbone.items() if key not in ("type", "large_kernel")}
        with on_meta():
            assert len(WBMMBackbone(**options).stages) == 4


def test_a_detector_takes_no_row_of_a_table():
    with pytest.raises(ValueError, match="table:windows/hier: the paper's ablations are on classification and ADE20K"):
        resolve_config("table:windows/hier", ".py", "detection")
