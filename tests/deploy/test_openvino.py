"""What is rewritten for OpenVINO, and how it runs there: exact, image by image, and without harm to the process."""

import ctypes
import gc
import subprocess
import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import LayerNorm2d

from tests.fixtures.tiny import tiny
from tests.helpers import randomize
from wbmm.deploy.export import export_model, to_openvino
from wbmm.deploy.export.graph import ConvolvedMixer, OpaqueMixer, opaque_convolution
from wbmm.deploy.export.to_openvino import MapNorm, WindowBlock, rewrite_for_openvino
from wbmm.deploy.runtime import open_runner
from wbmm.deploy.runtime import openvino as openvino_runtime
from wbmm.layers import FullConnection2d, FusedWBMM2d
from wbmm.models.fuse import fuse
from wbmm.ops import num_offsets, windowed
from wbmm.ops.backends.onednn.windowed import table_to_kernel
from wbmm.ops.profile import Profile, Thresholds, use_profile

openvino = pytest.importorskip("openvino")


@pytest.fixture(scope="module")
def net():
    return fuse(tiny())


@pytest.fixture(scope="module")
def path(net, tmp_path_factory):
    path = tmp_path_factory.mktemp("openvino") / "net.xml"
    export_model(net, path, size=(64, 64), dynamic_batch=True)
    return path


@pytest.mark.parametrize("centred", [False, True])
def test_a_norm_of_maps(centred):
    norm = randomize(LayerNorm2d(12, eps=1e-6)).double()
    x = torch.randn(2, 12, 5, 4, dtype=torch.float64) + 3
    x = x - x.mean(1, keepdim=True) if centred else x
    torch.testing.assert_close(MapNorm(norm, centred)(x), norm(x), rtol=1e-10, atol=1e-10)


def test_convolutions_in_front_of_norms_are_centred():
    """In float64, where nothing but the rewrite could differ."""
    stem = fuse(tiny()).stem.double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = stem(x)
    rewrite_for_openvino(stem)
    assert isinstance(stem.norm1, MapNorm)
    assert stem.norm1.centred
    assert stem.conv2(torch.randn(1, 4, 8, 8, dtype=torch.float64)).mean(1).abs().max() < 1e-12
    torch.testing.assert_close(stem(x), expected, rtol=1e-9, atol=1e-9)


def test_which_mixers_are_convolved():
    bias = torch.zeros(4)
    mixers = nn.ModuleList(
        [
            FusedWBMM2d(torch.randn(4, 169), bias, (7, 7)),
            FusedWBMM2d(torch.randn(4, 25), bias, (3, 3)),
            FusedWBMM2d(torch.randn(4, 169), bias, (7, 7)).to_dense(),
            FullConnection2d(4, 7).fuse(),
        ]
    )
    assert [type(mixer) for mixer in rewrite_for_openvino(mixers)] == [
        ConvolvedMixer,
        OpaqueMixer,
        OpaqueMixer,
        OpaqueMixer,
    ]


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate"])
@pytest.mark.parametrize("size", [(14, 21), (9, 12), (7, 7)])
def test_the_node_of_windows(size, mode):
    window = (7, 7)
    table, bias = torch.randn(3, num_offsets(window), dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    got = opaque_convolution(x, table_to_kernel(table, window), list(window), bias, mode)
    expected = windowed(x, [table], window, bias, padding_mode=mode)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_the_graph_has_convolutions_for_windows_and_linears(path):
    kinds = [node.get_type_name() for node in openvino.Core().read_model(path).get_ordered_ops()]
    assert kinds.count("GroupConvolution") == 4
    assert "MVN" not in kinds
    assert kinds.count("Convolution") == 5 + 2 * 4
    assert kinds.count("MatMul") == 2 * 4 + 1, "those of squeeze and excitation, and the classifier"


def test_what_was_tuned_for_this_processor_does_not_change_the_file(tmp_path):
    with use_profile(Profile(float32=Thresholds(least_side=99, least_width=31))):
        export_model(tiny("wbmm_a"), tmp_path / "tuned.xml", size=(64, 64))
    nodes = openvino.Core().read_model(tmp_path / "tuned.xml").get_ordered_ops()
    kernels = [list(node.input(1).get_shape())[-2:] for node in nodes if node.get_type_name() == "GroupConvolution"]
    assert [13, 15] in kernels
    assert all(width <= 15 for _, width in kernels)


@pytest.mark.parametrize(("size", "batch"), [((14, 21), 2), ((14, 14), 1), ((9, 12), 2), ((7, 7), 1)])
def test_blocks_that_cut_windows(size, batch):
    """In float64, where nothing but the rewrite could differ; a single window is not cut."""
    block = fuse(tiny("wbmm_a").stages[0].blocks)[0].double()
    x = torch.randn(batch, block.ffn.fc1.in_features, *size, dtype=torch.float64)
    expected = block(x)
    rewritten = rewrite_for_openvino(nn.Sequential(block))
    assert type(rewritten[0]) is WindowBlock
    torch.testing.assert_close(rewritten(x), expected, rtol=1e-10, atol=1e-10)


def test_the_graph_moves_no_axis_of_windows(path):
    nodes = openvino.Core().read_model(path).get_ordered_ops()
    perms = [list(node.input_value(1).get_node().get_data()) for node in nodes if node.get_type_name() == "Transpose"]
    assert perms
    assert all(perm in ([0, 2, 3, 1], [0, 3, 1, 2]) for perm in perms), "the rest would copy the map"


def test_a_file_in_bf16(path, net):
    """On a processor without bf16 OpenVINO computes in float32 all the same."""
    runner = open_runner(path, precision="bf16")
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = net(x)
    assert runner.name == "OpenVINO, bf16"
    torch.testing.assert_close(runner(x), expected, rtol=0.1, atol=0.1 * expected.abs().max().item())
    with pytest.raises(ValueError, match="precision 'bf16' is for OpenVINO files"):
        open_runner("wbmm_a", precision="bf16")


@pytest.mark.parametrize("name", ["wbmm_a", "wbmm_a_hier"])
@pytest.mark.parametrize("mode", ["zeros", "replicate"])
def test_any_size(name, mode, tmp_path):
    """Maps that windows do not divide, of sizes that the file does not know."""
    model = fuse(tiny(name, padding_mode=mode))
    export_model(model, tmp_path / "net.xml", dynamic_batch=True, dynamic_size=True)
    runner = open_runner(tmp_path / "net.xml")
    for shape in [(2, 3, 72, 100), (1, 3, 129, 64), (3, 3, 40, 56)]:
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(runner(x), model(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_images_of_a_batch_keep_their_order(path, net, batch):
    runner = open_runner(path)
    x = torch.randn(batch, 3, 64, 64)
    with torch.no_grad():
        expected = net(x)
    first = runner(x)
    torch.testing.assert_close(first, expected, rtol=1e-3, atol=1e-3)
    kept = first.clone()
    runner(torch.randn(batch, 3, 64, 64))
    assert torch.equal(first, kept), "results are copies"


def test_a_batch_that_fails_leaves_the_runner_usable(path):
    runner = open_runner(path)
    with pytest.raises(ValueError, match=r"images of 64x65 px: the file takes 64x64 px alone"):
        runner(torch.randn(2, 3, 64, 65))
    with pytest.raises(RuntimeError):
        runner._forward(torch.randn(2, 3, 64, 65))
    x = torch.randn(3, 3, 64, 64)
    torch.testing.assert_close(runner(x), torch.cat([runner(image) for image in x.split(1)]))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_batch_that_is_interrupted_leaves_no_request_running(path, monkeypatch, error):
    runner = open_runner(path)
    x = torch.randn(6, 3, 64, 64)
    expected = runner(x)
    finish, calls = openvino_runtime._finish, []

    def fail(request):
        calls.append(request)
        if len(calls) == 2:
            raise error("stop")
        return finish(request)

    monkeypatch.setattr(openvino_runtime, "_finish", fail)
    with pytest.raises((error, ValueError), match="stop"):
        runner(x)
    monkeypatch.undo()
    assert torch.equal(runner(x), expected)


def test_a_batch_too_small_for_all_cores_runs_in_turn(path, monkeypatch):
    runner = open_runner(path)
    run = runner._forward
    x = torch.randn(3, 3, 64, 64)
    monkeypatch.setattr(run, "_side_by_side", lambda images: pytest.fail("cores would be idle"))
    run.__dict__["many"] = [None] * 4
    expected = torch.cat([next(run._in_turn([image]))[0] for image in x.split(1)])
    torch.testing.assert_close(runner(x), expected)


def test_one_image_takes_what_is_compiled(path):
    run = open_runner(path)._forward
    x = torch.randn(8, 3, 64, 64)
    run(x)
    run(x[:1])
    assert "one" not in run.__dict__
    other = open_runner(path)._forward
    other(x[:1])
    assert "many" not in other.__dict__


def test_the_stack_of_signals_stays(path):
    """OpenVINO gives back the stack of a `Core` that is gone; the next signal then kills the process."""

    class Stack(ctypes.Structure):
        _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

    def current():
        stack = Stack()
        ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack))
        return stack.start

    x = torch.randn(2, 3, 64, 64)
    first = open_runner(path)
    first(x[:1])
    before = current()
    first(x)
    second = open_runner(path)
    second(x)
    del first
    gc.collect()
    del second
    gc.collect()
    assert current() == before


def test_importing_it_needs_no_openvino():
    code = f"import sys; sys.modules['openvino'] = None; import {to_openvino.__name__}, wbmm.deploy.runtime"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_norm_of_a_constant_map_is_its_bias():
    norm = randomize(LayerNorm2d(6, eps=1e-6))
    got = MapNorm(norm, centred=False)(torch.full((1, 6, 3, 3), 5.0))
    torch.testing.assert_close(
        got, F.layer_norm(torch.full((1, 3, 3, 6), 5.0), (6,), norm.weight, norm.bias).movedim(3, 1)
    )
