"""The zoo is one: registry, configurations, cards and docs use the same names, and no card is out of date."""

import importlib.util
import re
import shlex
import shutil
from pathlib import Path

import pytest
import timm
import yaml

import wbmm
from wbmm.commands.zoo_cards import make_pages, read_results
from wbmm.config_files import resolve_config
from wbmm.io.files import save_model
from wbmm.train.config import load_config
from wbmm.zoo import ZooModel, load_downstream, load_downstream_counts, load_zoo

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("make_zoo", ROOT / "tools" / "make_zoo.py")
make_zoo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_zoo)
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODEL = re.compile(r"(?<![\w./-])((?:wbmm|unireplknet)_[a-z](?:_(?:dense|hier))?)(?![\w-])")
CONFIG = re.compile(r"\bconfigs/[\w./-]+\.(?:yaml|py)\b")


def test_the_cards_are_up_to_date(capsys):
    assert make_zoo.main(check=True) == 0, capsys.readouterr().err


def test_a_card_that_is_stale_missing_or_left_over_is_named(tmp_path, capsys):
    for part in ("models", "docs/results"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in ("CITATION.cff", "README.md"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "models" / "wbmm_t.md").write_text("old")
    (tmp_path / "models" / "wbmm_s.md").unlink()
    (tmp_path / "models" / "wbmm_x.md").write_text("left over")
    assert make_zoo.main(check=True, root=tmp_path) == 1
    named = set(re.findall(r"\w+\.md", capsys.readouterr().err))
    assert {"wbmm_s.md", "wbmm_t.md", "wbmm_x.md"} <= named
    assert make_zoo.main(check=False, root=tmp_path) == 0
    assert make_zoo.main(check=True, root=tmp_path) == 0
    assert not (tmp_path / "models" / "wbmm_x.md").exists()


def test_the_registry_has_the_zoo():
    registered = {name for pattern in ("wbmm_*", "unireplknet_*") for name in timm.list_models(pattern)}
    assert registered == set(load_zoo())
    for name, model in load_zoo().items():
        tags = {cfg.partition(".")[2] for cfg in timm.list_pretrained(f"{name}.*")}
        assert tags == set(model.weights), name


def test_configurations_train_the_model_that_the_zoo_says():
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs" / "imagenet").glob("[!_]*.yaml")}
    assert files == {model.config for model in load_zoo().values() if model.config}
    for name, model in load_zoo().items():
        if model.config:
            assert load_config(ROOT / model.config).model.name == name


def test_segmentors_and_detectors_are_those_of_the_configurations():
    folders = [ROOT / "configs" / folder for folder in ("ade20k", "coco")]
    files = {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.glob("*.py")}
    assert {model.config for model in load_downstream().values()} == {file for file in files if "custom" not in file}
    assert list(load_downstream_counts()) == list(load_downstream()), "run: python scripts/count_zoo.py --downstream"
    for name, model in load_downstream().items():
        assert "_".join(Path(model.config).stem.split("_")[:2]) == name
        assert timm.is_model(model.backbone)
        assert f'arch="{model.backbone}"' in (ROOT / model.config).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docs_name_models_and_configurations_that_exist(path):
    text = path.read_text(encoding="utf-8")
    assert set(MODEL.findall(text)) <= set(load_zoo())
    assert [name for name in CONFIG.findall(text) if Path(name).stem != "CONFIG" and not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("name", ["wbmm_t", "wbmm_a_hier", "unireplknet_t", "unireplknet_a"])
def test_the_training_command_of_a_card_is_one(name):
    """With a configuration, a row of the paper's tables, or the recipe of another model."""
    text = (ROOT / "models" / f"{name}.md").read_text(encoding="utf-8")
    _, _, tool, config, *overrides = shlex.split(re.search(r"^torchrun .*$", text, re.MULTILINE)[0])
    assert (ROOT / tool).is_file()
    path, changes = resolve_config(config)
    assert changes.get("model", {}).get("name", load_config(path, overrides).model.name) == name


def test_weights_in_the_folder_describe_themselves(tmp_path, monkeypatch):
    """A file named by `local` in zoo.yaml: its form and checksum are read from it."""
    for file in ("CITATION.cff", "README.md"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "models").mkdir()
    entry = {"local": "small.safetensors", "num_classes": 5, "size": 56}
    pattern = ("DD", "WD", "(WD)x3", "MM")
    model = ZooModel("wbmm_a", "classification", (40, 80, 160, 320), pattern, weights={"my5": entry})
    monkeypatch.setattr("wbmm.commands.zoo_cards.load_zoo", lambda: {"wbmm_a": model})
    net = timm.create_model("wbmm_a", num_classes=5, dims=(8, 16, 24, 32)).eval()
    save_model(wbmm.fuse(net), tmp_path / "models" / "small.safetensors")
    line = next(line for line in make_pages(tmp_path)["models/wbmm_a.md"].splitlines() if line.startswith("| my5 |"))
    _, tag, file, form, licence, checksum, _ = line.split("|")
    assert (tag.strip(), form.strip(), licence.strip()) == ("my5", "compact", "Apache-2.0")
    assert "small.safetensors" in file
    assert re.fullmatch(r" [0-9a-f]{64} ", checksum)


def test_measured_rows_are_read_from_the_result_pages(tmp_path):
    table = "| model | mean |\n| --- | ---: |\n| wbmm_a | 98.61 |\n| `wbmm_t` | 99.00 |\n"
    other = "| row | mean |\n| --- | --- |\n| wbmm_a | 1 |\n"
    again = "| model | mean |\n| --- | ---: |\n| wbmm_a | 12.00 |\n"
    (tmp_path / "x.md").write_text(f"# x\n\n{table}\nMeasured: here, today.\n\n{other}\n{again}\nMeasured: there.\n")
    rows = [(result.model, result.row["mean"], result.measured) for result in read_results(tmp_path)]
    assert rows == [("wbmm_a", "98.61", "Measured: here, today."), ("wbmm_t", "99.00", "Measured: here, today.")]


def test_the_paper_is_cited_in_the_version_that_is_built():
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cff["version"] == wbmm.__version__
    assert len(cff["preferred-citation"]["authors"]) == 7
    bibtex = re.search(r"```bibtex\n(.*?)```", make_pages(ROOT)["models/wbmm_t.md"], re.DOTALL)[1]
    assert bibtex in (ROOT / "README.md").read_text(encoding="utf-8")


def test_segmentors_and_detectors_have_the_figures_of_the_papers_tables():
    """Where paper_tables.yaml has the two tables as well, under `dense`."""
    tables = yaml.safe_load((ROOT / "wbmm" / "paper_tables.yaml").read_text(encoding="utf-8")).get("dense", {})
    nets = {"7x7": "wbmm-{}-dense", "hier": "wbmm-{}-hier", "unireplknet": "unireplknet-{}"}
    keys = {"miou_ms": "miou_multi_scale", "ap_box": "box_ap", "ap_mask": "mask_ap"}
    for table, head in (("ade20k", "upernet"), ("coco", "cascade-mask-rcnn")):
        for row in tables.get(table, {}).get("rows", {}).values():
            paper = load_downstream()[f"{nets[row['backbone']].format(row['size'])}_{head}"].paper
            assert {keys.get(key, key): float(value) for key, value in row["paper"].items()}.items() <= paper.items()
