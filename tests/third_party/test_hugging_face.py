"""timm's folders in the hub's format, written and read here; the upload, with the hub replaced by a folder."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from timm.models import _hub

import wbmm


class FolderHub:
    """What timm asks of `huggingface_hub.HfApi`, with a folder for the hub."""

    root: Path

    def __init__(self, **settings):
        assert settings["library_name"] == "timm"

    def create_repo(self, repo_id, private, exist_ok):
        (self.root / repo_id).mkdir(parents=True, exist_ok=exist_ok)
        return SimpleNamespace(repo_id=repo_id)

    def file_exists(self, repo_id, filename, revision):
        return (self.root / repo_id / filename).is_file()

    def upload_folder(self, repo_id, folder_path, revision, create_pr, commit_message):
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)
        return commit_message


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Uploads and downloads go to a folder."""
    root = tmp_path / "hub"
    monkeypatch.setattr(FolderHub, "root", root, raising=False)
    monkeypatch.setattr(_hub, "HfApi", FolderHub)
    monkeypatch.setattr(_hub, "hf_hub_download", lambda repo_id, filename, **_: str(root / repo_id / filename))
    return root


def test_the_example_of_the_page(example):
    names = example("Hugging Face", skip=1)
    config = json.loads(Path(names["folder"], "config.json").read_text())
    assert config["architecture"] == "wbmm_a"
    assert config["num_classes"] == 3
    assert config["label_names"] == ["cat", "dog", "owl"]
    assert names["again"].num_classes == 3


@pytest.mark.parametrize("safe", [True, False, "both"])
@pytest.mark.parametrize(
    ("name", "arguments"), [("wbmm_a_hier", {}), ("wbmm_a", {"window_size": 14}), ("unireplknet_a", {})]
)
def test_a_folder_and_back(name, arguments, safe, tmp_path):
    model = timm.create_model(name, num_classes=4, ls_init_value=0.5, **arguments).eval()
    _hub.save_for_hf(model, tmp_path, model_args={"ls_init_value": 0.5, **arguments}, safe_serialization=safe)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        images = torch.rand(1, 3, 56, 56)
        assert torch.equal(again(images), model(images))
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=7, features_only=False).eval()
    assert other.get_classifier().out_features == 7
    assert torch.equal(other.stem.conv1.weight, model.stem.conv1.weight)


def test_the_upload_and_back(hub):
    model = timm.create_model("wbmm_a.tiny50", pretrained=True).eval()
    names = [f"class {number}" for number in range(50)]
    timm.models.push_to_hf_hub(model, "someone/wbmm_a-tiny50", model_config={"label_names": names})
    files = {path.name for path in (hub / "someone" / "wbmm_a-tiny50").iterdir()}
    assert files == {"README.md", "config.json", "model.safetensors", "pytorch_model.bin"}
    again = timm.create_model("hf-hub:someone/wbmm_a-tiny50", pretrained=True).eval()
    assert again.pretrained_cfg["label_names"] == names
    with torch.no_grad():
        images = torch.rand(1, 3, 56, 56)
        assert torch.equal(again(images), model(images))
        # The folder's weights are also a checkpoint of ours.
        found = wbmm.load_model(hub / "someone" / "wbmm_a-tiny50" / "model.safetensors")
        torch.testing.assert_close(found(images), model(images), rtol=1e-3, atol=1e-3)
