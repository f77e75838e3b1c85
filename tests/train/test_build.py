"""Fine-tuning starts from released files too, with another number of classes or another window."""

import pytest
import timm
import torch
from safetensors.torch import save_file

import wbmm
from tests.helpers import randomize
from tests.reference import released_state_dict
from wbmm import cli
from wbmm.models import state as state_module
from wbmm.models.state import CheckpointError
from wbmm.train.build import init_weights, set_arithmetic
from wbmm.train.config import config_from_dict


def test_from_a_released_file_with_other_classes(tmp_path):
    state = released_state_dict("wbmm_p")
    torch.save({"model": state}, tmp_path / "wbmm_p_in1k_224_w7.pth")
    model = timm.create_model("wbmm_p", num_classes=5)
    fresh = model.head.fc.weight.clone()
    said = init_weights(model, tmp_path / "wbmm_p_in1k_224_w7.pth")
    assert "the classifier is new (head.fc.weight, head.fc.bias)" in said
    torch.testing.assert_close(model.head.fc.weight, fresh)
    table = state["stages.1.0.dwconv.relative_position_bias_table"]
    torch.testing.assert_close(model.stages[1].blocks[0].mixer.table.data, table)


def test_other_windows_only_when_asked(tmp_path):
    narrow = {"dims": (8, 16, 32, 64), "num_classes": 3}
    source = randomize(timm.create_model("wbmm_a_dense", **narrow))
    torch.save({"model": source.state_dict()}, tmp_path / "run.pt")
    target = timm.create_model("wbmm_a_hier", **narrow)
    with pytest.raises(CheckpointError, match="resize_tables=True"):
        init_weights(target, tmp_path / "run.pt")
    init_weights(target, tmp_path / "run.pt", resize_tables=True)
    torch.testing.assert_close(target.stages[3].blocks[0].mixer.table, source.stages[3].blocks[0].mixer.table)


def test_a_fused_file_is_refused_and_its_source_named(tmp_path, capsys):
    model = randomize(timm.create_model("wbmm_a", dims=(8, 16, 32, 64), num_classes=3))
    torch.save({"model": model.state_dict()}, tmp_path / "run.pt")
    assert cli.main(["reparam", str(tmp_path / "run.pt"), str(tmp_path / "fused.safetensors")]) == 0
    with pytest.raises(CheckpointError, match=r"compact form.*cannot be trained.*training checkpoint.*: run\.pt"):
        init_weights(model, tmp_path / "fused.safetensors")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_is_read_once_and_its_names_are_converted_once(tmp_path, files_read, monkeypatch, suffix):
    state = released_state_dict("wbmm_p")
    path, model = tmp_path / f"weights{suffix}", timm.create_model("wbmm_p")
    torch.save({"model": state}, path) if suffix == ".pth" else save_file(state, path)
    converted, rename = [], state_module._rename
    monkeypatch.setattr(state_module, "_rename", lambda name, table: converted.append(name) or rename(name, table))
    init_weights(model, path)
    assert files_read == [path]
    assert len(converted) == sum(not key.endswith("relative_position_index") for key in state)


def test_a_fused_file_that_is_refused_is_read_once(tmp_path, files_read):
    wbmm.save_model(wbmm.fuse(timm.create_model("wbmm_a").eval()), tmp_path / "fused.pth")
    with pytest.raises(CheckpointError, match="cannot be trained"):
        init_weights(timm.create_model("wbmm_a"), tmp_path / "fused.pth")
    assert files_read == [tmp_path / "fused.pth"]


@pytest.fixture
def switches():
    """torch's, put back afterwards."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    yield cuda, cudnn
    cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, deterministic = before
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.parametrize(("values", "tf32"), [({}, True), ({"precision": "ieee"}, False)])
def test_the_precision_of_a_gpu_is_set_and_said(switches, values, tf32):
    cuda, cudnn = switches
    config = config_from_dict(values)
    text = set_arithmetic(config, torch.device("cuda"))
    assert (cuda.allow_tf32, cudnn.allow_tf32) == (tf32, tf32)
    assert text.startswith("precision tf32: products" if tf32 else "precision ieee: strict float32")
    assert "without effect on a CPU" in set_arithmetic(config, torch.device("cpu"))


@pytest.mark.parametrize("deterministic", [False, True])
def test_cudnn_looks_for_the_fastest_algorithm_unless_it_must_be_the_same(switches, deterministic):
    set_arithmetic(config_from_dict({"deterministic": deterministic}), torch.device("cpu"))
    assert switches[1].benchmark != deterministic
