"""Runners: one call for every kind of file, and one line for every kind of damage."""

import json
import random
import sys
from unittest.mock import Mock

import pytest
import timm
import torch

import wbmm
from tests.fuzz.mutate import ODD_VALUES, flip_bit, mutate_bytes, mutate_json
from tests.helpers import randomize
from wbmm.deploy.export import to_openvino
from wbmm.deploy.runtime import Runner, onnx_session, open_runner, openvino_model, torch_runner
from wbmm.deploy.runtime import openvino as openvino_runtime
from wbmm.io.card import ModelCard, card_of
from wbmm.io.digest import DAMAGED, DIGEST_KEY, EMPTY, seal, verify_digest
from wbmm.io.files import save_model
from wbmm.io.reader import METADATA_KEY
from wbmm.io.screen import _FIELDS, screen_onnx
from wbmm.models.state import CheckpointError

NARROW = {"dims": (8, 16, 32, 64), "num_classes": 10}


@pytest.fixture
def net():
    return randomize(timm.create_model("wbmm_a", **NARROW)).eval()


def write_onnx(path, card=None, batch="batch", size=("h", "w"), text=None, sealed=False, change=None):
    """A file that gives the mean of each channel; with `text` for its card, and with `change` made to the model."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from onnx import TensorProto, helper

    shape = [batch, 3, *size]
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["images", "axes"], ["logits"], keepdims=0)],
        "means",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 3])],
        [helper.make_tensor("axes", TensorProto.INT64, [2], [2, 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    if card is not None:
        text = card.to_json()
    if text is not None:
        helper.set_model_props(model, {METADATA_KEY: text, **({DIGEST_KEY: EMPTY} if sealed else {})})
    if change is not None:
        change(model)
    path.write_bytes(model.SerializeToString())
    if sealed:
        seal(path)
    return path


CARD = ModelCard(model="wbmm_a", num_classes=3, input_size=(3, 20, 24))


@pytest.mark.parametrize("form", ["training", "compact"])
def test_checkpoints(net, form, tmp_path):
    model = net if form == "training" else wbmm.fuse(net)
    save_model(model, tmp_path / "net.safetensors")
    runner = open_runner(tmp_path / "net.safetensors")
    assert runner.name == f"PyTorch, {form}"
    assert (runner.batch, runner.size) == (None, None)
    assert runner.card.model == "wbmm_a"
    x = torch.randn(2, 3, 40, 56)
    with torch.no_grad():
        torch.testing.assert_close(runner(x), model(x))


def test_a_model_without_classes_gives_its_maps(net):
    model = timm.create_model("wbmm_a", **{**NARROW, "num_classes": 0}).eval()
    maps = torch_runner(model)(torch.randn(1, 3, 64, 64))
    assert [tuple(m.shape) for m in maps] == [(1, 8, 16, 16), (1, 16, 8, 8), (1, 32, 4, 4), (1, 64, 2, 2)]


def test_onnx_of_any_batch(tmp_path):
    runner = open_runner(write_onnx(tmp_path / "net.onnx", CARD))
    assert (runner.name, runner.batch, runner.size, runner.card) == ("ONNX Runtime", None, None, CARD)
    x = torch.randn(5, 3, 20, 24)
    torch.testing.assert_close(runner(x), x.mean((2, 3)))


def test_a_fixed_batch_is_cut_and_padded(tmp_path):
    runner = open_runner(write_onnx(tmp_path / "net.onnx", CARD, batch=2, size=(20, 24)))
    assert (runner.batch, runner.size) == (2, (20, 24))
    for count in (1, 2, 5):
        x = torch.randn(count, 3, 20, 24)
        torch.testing.assert_close(runner(x), x.mean((2, 3)))
    with pytest.raises(ValueError, match="images of 20x25 px: the file takes 20x24 px alone"):
        runner(torch.randn(2, 3, 20, 25))


def test_openvino(tmp_path):
    openvino = pytest.importorskip("openvino")
    model = openvino.convert_model(write_onnx(tmp_path / "net.onnx", batch=2))
    model.set_rt_info(CARD.to_json(), [METADATA_KEY])
    openvino.save_model(model, tmp_path / "net.xml")
    runner = open_runner(tmp_path / "net.xml")
    assert (runner.name, runner.batch, runner.size, runner.card) == ("OpenVINO", 2, None, CARD)
    x = torch.randn(3, 3, 20, 24)
    torch.testing.assert_close(runner(x), x.mean((2, 3)))
    with pytest.raises(ValueError, match="OpenVINO files run on the CPU"):
        open_runner(tmp_path / "net.xml", device="cuda")


def test_threads_follow_pytorch(tmp_path):
    path = write_onnx(tmp_path / "net.onnx", CARD)
    assert onnx_session(path, threads=1).get_session_options().intra_op_num_threads == 1
    assert onnx_session(path).get_session_options().intra_op_num_threads == torch.get_num_threads()
    openvino = pytest.importorskip("openvino")
    compiled = openvino_model(openvino.convert_model(path), threads=1)
    assert compiled.get_property("INFERENCE_NUM_THREADS") == 1
    assert compiled.get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(3, 20, 24), r"shape \(3, 20, 24\): expected \[batch, 3, height, width\]"),
        (torch.zeros(1, 1, 20, 24), r"expected \[batch, 3, height, width\]"),
        (torch.zeros(0, 3, 20, 24), r"shape \(0, 3, 20, 24\)"),
        (torch.zeros(1, 3, 20, 24, dtype=torch.uint8), r"torch.uint8: the model takes normalized ones, torch.float32"),
    ],
)
def test_images_that_do_not_fit(images, message):
    with pytest.raises(ValueError, match=message):
        Runner("test", CARD, lambda x: [x])(images)


def test_a_runtime_that_fails_says_so_in_one_line():
    def forward(x):
        raise RuntimeError("first\n\nthe reason")

    with pytest.raises(ValueError, match=r"^test failed on images of shape 1x3x20x24: the reason$"):
        Runner("test", CARD, forward)(torch.zeros(1, 3, 20, 24))


@pytest.mark.parametrize("suffix", [".onnx", ".xml", ".pt2", ".pth", ".safetensors"])
def test_damaged_and_missing_files(suffix, tmp_path):
    path = tmp_path / f"net{suffix}"
    with pytest.raises(ValueError, match=f"net{suffix}: there is no such file"):
        open_runner(path)
    path.write_bytes(b"<net>" + bytes(range(200)))
    path.with_suffix(".bin").write_bytes(b"")
    with pytest.raises(ValueError, match=f"net{suffix}: (not a readable|refused)") as caught:
        open_runner(path)
    assert "\n" not in str(caught.value)


def write_openvino(path):
    openvino = pytest.importorskip("openvino")
    to_openvino.save_openvino(openvino.convert_model(write_onnx(path.with_suffix(".onnx"))), CARD, path)
    return path


@pytest.mark.parametrize("suffix", [".onnx", ".xml", ".bin"])
def test_damage_is_found_before_a_runtime_sees_the_file(suffix, tmp_path, monkeypatch):
    path = tmp_path / ("net.onnx" if suffix == ".onnx" else "net.xml")
    write_onnx(path, CARD, sealed=True) if suffix == ".onnx" else write_openvino(path)
    x = torch.randn(2, 3, 20, 24)
    torch.testing.assert_close(open_runner(path)(x), x.mean((2, 3)))
    assert verify_digest(path)
    file = path.with_suffix(suffix)
    data, rng = file.read_bytes(), random.Random(0)
    monkeypatch.setattr("onnxruntime.InferenceSession", None)
    monkeypatch.setattr(openvino_runtime, "_core", lambda: None)
    slot = data.find(DIGEST_KEY.encode())
    tried = 0
    for number in range(100):
        damaged = flip_bit(data, rng) if number % 2 else mutate_bytes(data, rng)
        if damaged == data or (slot >= 0 and data[slot : slot + 90] not in damaged):
            continue  # without its checksum a file is like any other
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"net\.(onnx|xml): {DAMAGED}$"):
            open_runner(path)
        tried += 1
    assert tried > 40


def test_an_xml_beside_the_weights_of_another(tmp_path):
    path = write_openvino(tmp_path / "net.xml")
    path.with_suffix(".bin").write_bytes(bytes(path.with_suffix(".bin").stat().st_size))
    with pytest.raises(ValueError, match=DAMAGED):
        open_runner(path)


def test_a_file_without_a_checksum_is_read_as_it_is(tmp_path):
    path = write_onnx(tmp_path / "net.onnx", CARD)
    assert not verify_digest(path)
    assert open_runner(path).card == CARD


@pytest.mark.parametrize("place", ["../../etc/passwd", "/etc/passwd", "weights.bin"])
def test_an_onnx_file_that_takes_weights_from_elsewhere(place, tmp_path):
    from onnx import TensorProto

    def change(model):
        tensor = model.graph.initializer[0]
        tensor.ClearField("int64_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=place)

    def inside_a_node(model):
        change(model)
        node = model.graph.node.add(op_type="Constant", output=["c"])
        node.attribute.add(name="value").t.CopyFrom(model.graph.initializer.pop())

    for how in (change, inside_a_node):
        path = write_onnx(tmp_path / "net.onnx", CARD, change=how)
        with pytest.raises(ValueError, match=r"net\.onnx: refused, since it takes weights from other files"):
            open_runner(path)


def test_the_map_of_onnx_messages_is_onnxs_own():
    """Every field through which a tensor can be reached is walked through."""
    onnx = pytest.importorskip("onnx")
    for name, known in _FIELDS.items():
        fields = getattr(onnx, name).DESCRIPTOR.fields
        found = {f.number: f.message_type.name for f in fields if f.message_type and f.message_type.name in _FIELDS}
        assert found == known, name


def complaint(function, *args):
    """The error that a function ends in, if it does."""
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return ""


def test_bytes_that_are_no_onnx(tmp_path):
    path = write_onnx(tmp_path / "net.onnx", CARD)
    data, rng = path.read_bytes(), random.Random(1)
    found = []
    for _ in range(300):
        path.write_bytes(mutate_bytes(data, rng))
        found.append(complaint(screen_onnx, path))
    assert {"not a readable ONNX file" in text for text in found if text} == {True}
    assert sum(map(bool, found)) > 50


def _another_input(model):
    model.graph.input.add().CopyFrom(model.graph.input[0])
    model.graph.input[1].name = "more"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_another_input, "its inputs are of shape"),
        (lambda model: model.graph.input[0].type.tensor_type.shape.dim.pop(), "not a readable ONNX file"),
        (lambda model: setattr(model.graph.node[0], "op_type", "Nonsense"), "not a readable ONNX file"),
        (lambda model: setattr(model.graph.node[0], "domain", "evil.ops"), "not a readable ONNX file"),
        (lambda model: model.graph.ClearField("node"), "not a readable ONNX file"),
        (lambda model: model.ClearField("graph"), "not a readable ONNX file"),
    ],
)
def test_onnx_files_of_something_else(change, message, tmp_path):
    path = write_onnx(tmp_path / "net.onnx", CARD, change=change)
    with pytest.raises(ValueError, match=rf"net\.onnx: {message}") as caught:
        open_runner(path)
    assert str(caught.value).isprintable()


def test_outputs_that_are_not_what_the_card_says(tmp_path):
    runner = open_runner(write_onnx(tmp_path / "net.onnx", CARD.replace(num_classes=10)))
    with pytest.raises(
        ValueError, match=r"ONNX Runtime gives outputs of shape \(2, 3\) for 2 images, which does not fit"
    ):
        runner(torch.zeros(2, 3, 20, 24))
    for outputs in ([], [torch.tensor(1.0)], [torch.zeros(1, 3)]):
        with pytest.raises(ValueError, match="which does not fit wbmm_a"):
            Runner("test", CARD, lambda x, outputs=outputs: outputs)(torch.zeros(2, 3, 20, 24))


def test_cards_of_wrong_types_are_one_line(tmp_path):
    rng = random.Random(2)
    texts = [json.dumps(value) for value in ODD_VALUES] + ["{", "\x1b]0;pwned\x07"]
    texts += [mutate_json(CARD.to_json(), rng) for _ in range(40)]
    found = [complaint(open_runner, write_onnx(tmp_path / "net.onnx", text=text)) for text in texts]
    assert sum(map(bool, found)) > 20
    for text in filter(None, found):
        assert text.startswith(str(tmp_path))
        assert text.isprintable()
        assert len(text) < 1000


@pytest.mark.parametrize(
    "text",
    [
        '<?xml version="1.0"?><!DOCTYPE net [<!ENTITY x SYSTEM "file:///etc/passwd">]><net name="&x;"/>',
        '<?xml version="1.0"?><!doctype net><net/>',
        "\ufeff<net>",
        "",
        '<net name="' + "a" * 100_000 + '" version="11"/>',
        '<?xml version="1.0"?>' + "<net>" * 20_000,
    ],
    ids=["entity", "doctype", "mark", "empty", "long", "deep"],
)
def test_xml_of_strangers(text, tmp_path):
    pytest.importorskip("openvino")
    path = tmp_path / "net.xml"
    path.write_text(text)
    path.with_suffix(".bin").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"net\.xml: (refused|not a readable OpenVINO file|the file does not say what it is)"
    ) as caught:
        open_runner(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_truncated_onnx_file(tmp_path):
    path = write_onnx(tmp_path / "net.onnx", CARD)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="not a readable ONNX file"):
        open_runner(path)


def test_an_xml_without_its_weights(tmp_path):
    (tmp_path / "net.xml").write_text("<net/>")
    with pytest.raises(ValueError, match=r"the weights are missing, net\.bin beside it"):
        open_runner(tmp_path / "net.xml")


def test_files_that_do_not_say_what_they_are(tmp_path):
    path = write_onnx(tmp_path / "net.onnx")
    with pytest.raises(ValueError, match=r"does not say what it is .*write it with `wbmm export`"):
        open_runner(path)


def test_another_model_than_asked_for(tmp_path):
    path = write_onnx(tmp_path / "net.onnx", CARD)
    assert open_runner(path, model="wbmm_a").card.model == "wbmm_a"
    with pytest.raises(ValueError, match="is a wbmm_a, not a wbmm_t"):
        open_runner(path, model="wbmm_t")


def test_names(monkeypatch):
    with pytest.raises(ValueError, match="wbmm_q: neither a file nor a model that timm knows; did you mean"):
        open_runner("wbmm_q")
    unreachable = CheckpointError("wbmm_t: its weights could not be downloaded")
    with monkeypatch.context() as patch:
        patch.setattr(timm, "create_model", Mock(side_effect=unreachable))
        with pytest.raises(CheckpointError, match=f"^{unreachable}$"):  # it says what to do: no other is around it
            open_runner("wbmm_t")
    with pytest.raises(ValueError, match="wbmm_f: its pretrained weights are not available"):
        open_runner("wbmm_f")  # none are published
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: ORIGINAL(name, **NARROW).eval())
    runner = open_runner("wbmm_a")
    assert runner.card == card_of(ORIGINAL("wbmm_a", **NARROW))
    assert runner(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


ORIGINAL = timm.create_model


@pytest.mark.parametrize(("package", "suffix"), [("onnxruntime", ".onnx"), ("openvino", ".xml")])
def test_missing_packages_are_named(package, suffix, tmp_path, monkeypatch):
    (tmp_path / f"net{suffix}").write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"needs the package {package}: pip install 'wbmm\[export\]'"):
        open_runner(tmp_path / f"net{suffix}")


def test_a_device_that_onnxruntime_does_not_have(tmp_path):
    path = write_onnx(tmp_path / "net.onnx", CARD)
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this one has it")
    with pytest.raises(ValueError, match="this onnxruntime has no CUDAExecutionProvider"):
        open_runner(path, device="cuda")


class OnnxSession:
    """Stands in for `onnxruntime.InferenceSession` on a machine with GPUs."""

    def __init__(self, path, options, providers):
        self.providers = providers

    def get_providers(self):
        return [name for name, _ in self.providers]


@pytest.mark.parametrize(
    ("device", "options", "wanted"),
    [
        ("cpu", {}, [("CPUExecutionProvider", {})]),
        ("cuda", {}, [("CUDAExecutionProvider", {"device_id": 0})]),
        ("cuda:1", {}, [("CUDAExecutionProvider", {"device_id": 1})]),
        ("cuda:1", {"tf32": False}, [("CUDAExecutionProvider", {"device_id": 1, "use_tf32": 0})]),
        (
            "cuda:2",
            {"tensorrt": True},
            [("TensorrtExecutionProvider", {"device_id": 2}), ("CUDAExecutionProvider", {"device_id": 2})],
        ),
    ],
)
def test_the_gpu_of_onnxruntime_is_the_one_asked_for(device, options, wanted, tmp_path, monkeypatch):
    path = write_onnx(tmp_path / "net.onnx", CARD)
    available = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: available)
    monkeypatch.setattr("onnxruntime.InferenceSession", OnnxSession)
    assert onnx_session(path, device, **options).providers == wanted


def test_onnxruntime_does_not_fall_back_to_the_cpu_in_silence(tmp_path, monkeypatch):
    path = write_onnx(tmp_path / "net.onnx", CARD)
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr("onnxruntime.InferenceSession", OnnxSession)
    monkeypatch.setattr(OnnxSession, "get_providers", lambda self: ["CPUExecutionProvider"])
    with pytest.raises(ValueError, match=r"device 'cuda:1': onnxruntime could not load CUDAExecutionProvider"):
        open_runner(path, device="cuda:1")
