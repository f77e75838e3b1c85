"""Hostile .pt2 files: whatever `torch.export.load` would run in one, our loader refuses."""

import contextlib
import json
import os
import pickle
import zipfile

import pytest
import torch
import torch.nn as nn

from wbmm.deploy.card import ModelCard
from wbmm.deploy.export import Source, export_source
from wbmm.deploy.export.archive import check_archive
from wbmm.deploy.runtime import open_runner


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The parts of a good file."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("good") / "net.pt2"
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    card = ModelCard(model="wbmm_a", num_classes=5, input_size=(3, 64, 64))
    export_source(Source(net, card, ["logits"]), path, dynamic_batch=True)
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write(path, parts, root="net/"):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(root + name, content)
    return path


def bomb(tmp_path):
    torch.save(({"x": Bomb(tmp_path / "pwned")}, {}), tmp_path / "bomb")
    content = (tmp_path / "bomb").read_bytes()
    (tmp_path / "bomb").unlink()
    return content


def edited(parts, change, name="models/model.json"):
    content = json.loads(parts[name])
    change(content)
    return {**parts, name: json.dumps(content).encode()}


def sample_inputs(parts, tmp_path):
    return {**parts, "data/sample_inputs/model.pt": bomb(tmp_path)}


def pickled_weight(parts, tmp_path):
    def change(config):
        next(iter(config["config"].values()))["use_pickle"] = True

    return {**edited(parts, change, "data/weights/model_weights_config.json"), "data/weights/weight_0": bomb(tmp_path)}


def legacy_weights(parts, tmp_path):
    return {**parts, "data/weights/model.pt": bomb(tmp_path)}


def custom_object(parts, tmp_path):
    def change(config):
        next(iter(config["config"].values()))["path_name"] = "custom_obj_0"

    return {**edited(parts, change, "data/weights/model_weights_config.json"), "data/constants/custom_obj_0": b"x"}


def foreign_operator(parts, tmp_path):
    def change(program):
        program["graph_module"]["graph"]["nodes"][0]["target"] = "torch.os.mkdir"

    return edited(parts, change)


def expression(parts, tmp_path):
    def change(program):
        code = f"__import__('os').mkdir('{tmp_path / 'pwned'}')"
        program["graph_module"]["graph"]["tensor_values"]["images"]["sizes"][0]["as_expr"]["expr_str"] = code

    return edited(parts, change)


def expression_without_quotes(parts, tmp_path):
    def change(program):
        code = "+".join(f"chr({ord(letter)})" for letter in "1")
        program["graph_module"]["graph"]["tensor_values"]["images"]["sizes"][0]["as_expr"]["expr_str"] = f"eval({code})"

    return edited(parts, change)


def guard(parts, tmp_path):
    return edited(parts, lambda program: program["guards_code"].append(f"open('{tmp_path / 'pwned'}', 'w')"))


def library(parts, tmp_path):
    return {**parts, "data/aotinductor/model/a.so": b"\x7fELF"}


HOSTILE = [
    sample_inputs,
    pickled_weight,
    legacy_weights,
    custom_object,
    foreign_operator,
    expression,
    expression_without_quotes,
    guard,
    library,
]


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
def test_nothing_in_a_file_runs(make, parts, tmp_path):
    path = write(tmp_path / "evil.pt2", make(parts, tmp_path))
    with pytest.raises(ValueError, match=r"evil\.pt2: refused, since it could run code when loaded") as caught:
        open_runner(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("make", [sample_inputs, pickled_weight, expression], ids=lambda make: make.__name__)
def test_the_traps_are_real(make, parts, tmp_path):
    """Loading the same file without our check springs them."""
    path = write(tmp_path / "evil.pt2", make(parts, tmp_path))
    with contextlib.suppress(Exception):  # which comes after the damage
        torch.export.load(path)
    assert (tmp_path / "pwned").exists()


def test_a_file_in_the_older_layout_is_refused(parts, tmp_path):
    names = ("serialized_exported_program.json", "serialized_state_dict.pt", "serialized_constants.pt")
    older = {"version": b"8.8", "serialized_example_inputs.pt": bomb(tmp_path), **dict.fromkeys(names, bomb(tmp_path))}
    for content in (older, {**{f"net/{name}": part for name, part in parts.items()}, **older}):
        path = write(tmp_path / "evil.pt2", content, root="")
        with pytest.raises(ValueError, match=r"evil\.pt2: (refused|not a readable)"):
            open_runner(path)
    assert not (tmp_path / "pwned").exists()


def test_good_files_pass_whatever_their_root(parts, tmp_path):
    path = write(tmp_path / "good.pt2", parts, root="another/")
    assert check_archive(path).read(2) == b"PK"
    runner = open_runner(path)
    assert runner.name == "torch.export"
    assert runner(torch.zeros(3, 3, 64, 64)).shape == (3, 5)


def test_damage(parts, tmp_path):
    path = write(tmp_path / "cut.pt2", parts)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"not a readable torch\.export file"):
        open_runner(path)
    write(path, {**parts, "models/model.json": b"{"})
    with pytest.raises(ValueError, match=r"not a readable torch\.export file"):
        open_runner(path)
    path.write_bytes(pickle.dumps(Bomb(tmp_path / "pwned")))
    with pytest.raises(ValueError, match=r"not a readable torch\.export file"):
        open_runner(path)
    assert not (tmp_path / "pwned").exists()
