"""Hostile .pt2 files: whatever `torch.export.load` would run in one, our loader refuses."""

import contextlib
import json
import os
import pickle
import random
import time
import zipfile

import pytest
import torch
import torch.nn as nn

from tests.fixtures.tiny import tiny
from tests.fuzz.mutate import flip_bit
from wbmm.deploy.export import Exportable, export_to_file
from wbmm.deploy.export.graph import capture
from wbmm.deploy.export.verify import Shapes
from wbmm.deploy.runtime import open_runner
from wbmm.io.card import ModelCard
from wbmm.io.digest import DAMAGED, digest_of_parts
from wbmm.io.pt2 import DIGEST_PART, OPERATORS, check_archive, check_operators, read_parts
from wbmm.models.fuse import fuse


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


class Expand(nn.Module):
    """Repeats every value, and takes the first again."""

    def forward(self, x):
        return x[..., None].expand(-1, -1, 4)[..., 0]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A file of ours."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("good") / "net.pt2"
    net = nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), Expand()
    ).eval()
    card = ModelCard(model="wbmm_a", num_classes=5, input_size=(3, 64, 64))
    export_to_file(Exportable(net, card, ["logits"]), path, dynamic_batch=True)
    return path


@pytest.fixture(scope="module")
def parts(good):
    """The parts of a good file, without the checksum, which a stranger would write anew."""
    return read_parts(good).contents


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


def argument(kind, value):
    def make(parts, tmp_path):
        def change(program):
            program["graph_module"]["graph"]["nodes"][0]["inputs"][-1]["arg"] = {kind: value}

        return edited(parts, change)

    make.__name__ = f"{kind} {value}"[:40]
    return make


def field(*place, value):
    """Another value somewhere in the program."""

    def make(parts, tmp_path):
        def change(program):
            for key in place[:-1]:
                program = program[key]
            program[place[-1]] = value

        return edited(parts, change)

    make.__name__ = f"{place[-1]} {value}"[:40]
    return make


GRAPH = ("graph_module", "graph")
NODE = (*GRAPH, "nodes", 0)
SIDE = (*GRAPH, "tensor_values", "images", "sizes", 0, "as_expr", "expr_str")
HOSTILE = [
    argument("as_string", "/etc/passwd"),
    argument("as_device", {"type": "cuda", "index": 0}),
    argument("as_operator", "torch.load"),
    argument("as_graph", {"name": "inner", "graph": {}}),
    argument("as_custom_obj", {"name": "x", "class_fqn": "__torch__.torch.classes.x"}),
    argument("as_string_to_argument", {"x": {"as_operator": "torch.load"}}),
    field(*NODE, "name", value="torch.ops = x"),
    field(*NODE, "name", value="x\nimport os"),
    field(*NODE, "metadata", value={"source_fn_stack": "x,torch.os.abort"}),
    field(*GRAPH, "custom_obj_values", value={"x": {"name": "x", "class_fqn": "y"}}),
    field("graph_module", "metadata", value={"custom": "{}"}),
    field("graph_module", "signature", "input_specs", 0, "parameter", "parameter_name", value="__class__.forward"),
    field("graph_module", "signature", "input_specs", 0, value={"token": {"arg": {"name": "x"}}}),
    field(*SIDE, value="Pow(Integer(9), Pow(Integer(9), Pow(Integer(9), Integer(9))))"),
    field(*SIDE, value="9**9**9**9"),
    field(*SIDE, value="Integer(99999999999999999999)"),
    field("guards_code", value=["9**9**9 > 0"]),
    field("guards_code", value=["L['images'].size.__self__"]),
    field("guards_code", value=["'images'*99999999999 == 1"]),
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


STRANGE_OPERATORS = [
    *("torch.ops.aten.save.default", "torch.ops.aten.from_file.default", "torch.ops.aten._print.default"),
    *("torch.ops.aten.full.default", "torch.ops.aten.set_.source_Storage", "torch.ops.aten.resize_.default"),
    *(
        "torch.ops.prims.device_put.default",
        "torch.ops.inductor.accumulate_grad_.default",
        "torch.ops.wbmm.other.default",
    ),
    *(
        "torch.ops.higher_order.cond",
        "torch.ops.higher_order.print",
        "torch.ops.higher_order.triton_kernel_wrapper_mutation",
    ),
    *(
        "torch.ops.load_library",
        "torch.ops.mine.anything.default",
        "torch.ops.aten.add.Tensor.__call__",
        "#mine:anything",
    ),
    *(
        "torch.load",
        "torch.hub.load",
        "torch.os.system",
        "torch.utils.cpp_extension.load",
        "torch.classes.load_library",
    ),
    *("_operator.methodcaller", "_operator.attrgetter", "_operator.pow", "_operator.setitem", "_operator.lshift"),
    *("builtins.eval", "builtins.open", "math.factorial", "math.perm", "os.system", "", " torch.ops.aten.add.Tensor"),
]


@pytest.mark.parametrize("target", STRANGE_OPERATORS)
def test_an_operator_is_on_the_list_or_the_file_is_refused(target, parts, tmp_path):
    path = write(tmp_path / "evil.pt2", field(*NODE, "target", value=target)(parts, tmp_path))
    with pytest.raises(ValueError, match=r"refused, since it could run code when loaded \(the operator ") as caught:
        check_archive(path)
    assert repr(target) in str(caught.value)


def test_every_operator_of_the_list_is_harmless():
    """Each is one of torch's or ours, none takes a name of a file, and what changes its input is known."""
    changing = set()
    for target in OPERATORS:
        place, *names = target.split(".")
        found = {"torch": torch, "_operator": __import__("operator")}[place]
        for name in names:
            found = getattr(found, name)
        if place == "torch":
            schema = found._schema
            texts = {argument.name for argument in schema.arguments if "str" in str(argument.type)}
            assert texts <= {"mode", "padding_mode", "approximate", "rounding_mode"}, target
            changing |= {target} if schema.is_mutable else set()
    assert {name.split(".")[3] for name in changing} <= {"add_", "relu_", "silu_", "hardswish_"}


def test_the_list_has_what_models_of_ours_use(tmp_path):
    """A part of what it was made from; a model with another operator is told so before anything is written."""
    nets = [fuse(tiny("wbmm_a_hier")), tiny("wbmm_a", mixer="half")]
    card = ModelCard(model="odd", num_classes=3, input_size=(3, 64, 96))
    used = set()
    for net in nets:
        program = capture(net, Shapes(3, (64, 96)), card)
        check_operators(program, card)
        used |= {str(node.target) for node in program.graph.nodes}
    assert len(used) > 25

    class Odd(nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x).mean((2, 3))

    with pytest.raises(
        ValueError, match=r"odd computes torch\.ops\.aten\.special_bessel_j0\.default, which \.pt2 files may not hold"
    ):
        export_to_file(Exportable(Odd().eval(), card, ["logits"]), tmp_path / "odd.pt2")
    assert not (tmp_path / "odd.pt2").exists()


def set_argument(parts, operator, name, value):
    def change(program):
        for node in program["graph_module"]["graph"]["nodes"]:
            for argument in node["inputs"]:
                if node["target"] == operator and argument["name"] == name:
                    argument["arg"] = value

    return edited(parts, change)


@pytest.mark.parametrize(
    ("operator", "name", "value"),
    [
        ("torch.ops.aten.expand.default", "size", {"as_ints": [-1, -1, 10**12]}),
        ("torch.ops.aten.conv2d.default", "padding", {"as_ints": [10**6, 10**6]}),
        ("torch.ops.aten.adaptive_avg_pool2d.default", "output_size", {"as_ints": [10**6, 10**6]}),
    ],
)
def test_a_tensor_that_fits_into_no_memory(operator, name, value, parts, tmp_path):
    path = write(tmp_path / "evil.pt2", set_argument(parts, operator, name, value))
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"evil\.pt2: refused, since \w+ has .* elements; 1073741824 are allowed"):
        open_runner(path)
    assert time.monotonic() - start < 20


WEIGHTS = "data/weights/model_weights_config.json"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sizes", [{"as_int": 10**12}, {"as_int": 1}, {"as_int": 1}, {"as_int": 1}]),
        ("sizes", [{"as_int": -1}] * 4),
        ("strides", [{"as_int": 10**12}] * 4),
        ("storage_offset", {"as_int": 10**9}),
        ("dtype", 33),
        ("layout", 1),
        ("device", {"type": "cuda", "index": 0}),
    ],
)
def test_tensors_that_are_not_there(key, value, parts, tmp_path):
    def change(config):
        next(iter(config["config"].values()))["tensor_meta"][key] = value

    changed = edited(parts, change, WEIGHTS)
    for content in (changed, {**changed, "data/weights/weight_0": b""}):  # torch makes zeros where there are no bytes
        with pytest.raises(ValueError, match=r"evil\.pt2: refused"):
            open_runner(write(tmp_path / "evil.pt2", content))


def test_archives_that_are_not_plain(parts, tmp_path):
    path = tmp_path / "evil.pt2"

    def refused(reason):
        with pytest.raises(ValueError, match=rf"evil\.pt2: refused, since it is no plain archive \({reason}") as caught:
            open_runner(path)
        assert "\n" not in str(caught.value)

    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("net/data/weights/weight_0", bytes(50_000_000))
    refused("a part that is compressed")
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("../x", "x"):
            archive.writestr(f"net/{name}", b"")
    refused(r"a part called 'net/\.\./x'")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/version", b"1")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("net/version", b"2")
    refused("two parts of one name")
    write(path, {f"data/weights/weight_{i}": bytes(1000) for i in range(3)})
    data = path.read_bytes()
    sizes = (1000).to_bytes(4, "little") * 2
    assert data.count(sizes) == 6
    path.write_bytes(data[:2000] + data[2000:].replace(sizes, (10**9).to_bytes(4, "little") * 2))
    refused("parts that share their bytes")


def test_what_torch_reads_is_what_was_checked(parts, tmp_path):
    """Bytes before, after and between the parts are not handed on."""
    path = write(tmp_path / "net.pt2", parts)
    path.write_bytes(b"#!/bin/sh\n" + path.read_bytes())
    with zipfile.ZipFile(check_archive(path)) as archive:
        assert {name.partition("/")[2] for name in archive.namelist()} == set(parts)


def test_a_flipped_bit_is_found(good, parts, tmp_path):
    assert read_parts(good).sealed
    seal = digest_of_parts(parts)
    rng = random.Random(0)
    path, data = tmp_path / "net.pt2", good.read_bytes()
    weights = read_parts(good).contents["data/weights/weight_0"]
    place = data.index(weights)
    for _ in range(20):  # in the weights, which zip has a CRC of
        path.write_bytes(data[:place] + flip_bit(weights, rng) + data[place + len(weights) :])
        with pytest.raises(ValueError, match=f"net.pt2: {DAMAGED}$"):
            open_runner(path)
    changed = {**parts, "data/weights/weight_0": flip_bit(weights, rng)}
    write(path, {**changed, DIGEST_PART: seal.encode()})
    with pytest.raises(ValueError, match=f"net.pt2: {DAMAGED}$"):
        read_parts(path)
    assert not read_parts(write(path, changed)).sealed  # without a checksum, nobody knows
    assert open_runner(path).name == "torch.export"


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
