"""The backend where there is no GPU: why it cannot run, and its operators on tensors that only pretend to be on one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers import has_fake_cuda
from wbmm.layers import Block, HierarchicalWBMM2d, MultiKernelWBMM2d, WBMM2d
from wbmm.ops import dispatch, use_backend
from wbmm.ops.backends import Call
from wbmm.ops.backends import triton as backend
from wbmm.ops.backends.triton import Triton, trial
from wbmm.ops.tables import num_offsets

WINDOW = (7, 7)


def test_the_kernels_are_imported_where_they_run():
    """Not with the package, nor by asking the backend about a map on a CPU."""
    code = (
        "import sys, torch, wbmm\n"
        "wbmm.WBMM2d(3, 7)(torch.zeros(1, 3, 8, 8))\n"
        "print([name for name in sys.modules if name.startswith('wbmm.ops.backends.triton.')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['wbmm.ops.backends.triton.context', 'wbmm.ops.backends.triton.trial']"


def test_the_check_for_a_gpu_needs_one(tmp_path):
    script = Path(__file__).parents[4] / "scripts" / "gpu_check.sh"
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        ["bash", str(script), str(tmp_path / "out.txt")], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "no CUDA device is visible" in run.stderr
    assert not (tmp_path / "out.txt").exists()


@pytest.mark.heavy
def test_the_check_for_a_gpu_runs_on_a_cpu_as_far_as_it_can(tmp_path):
    """All of its commands, on small models."""
    script = Path(__file__).parents[4] / "scripts" / "gpu_check.sh"
    environment = {**os.environ, "PYTHON": sys.executable, "DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        ["bash", str(script), str(tmp_path / "out.txt")], env=environment, capture_output=True, text=True
    )
    said = (tmp_path / "out.txt").read_text()
    assert run.returncode == 0, said
    assert "\n0 steps failed\n" in said
    assert "beside the computed limits of a100" in said


def call(x=None, window=WINDOW, tables=1, table=None, operator="windowed"):
    x = torch.zeros(2, 8, 9, 10) if x is None else x
    table = torch.zeros(x.shape[1], num_offsets(window), device=x.device) if table is None else table
    return Call(operator, x, (table,), False, window, tables)


@pytest.fixture
def interpreter(monkeypatch):
    """The backend as it is with TRITON_INTERPRET=1, as far as its answers go."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


class TestReasons:
    def test_device(self):
        assert Triton().can_run(call()) == "it runs on an NVIDIA GPU, and the map is on cpu"
        with use_backend("triton"), pytest.raises(ValueError, match="'triton' cannot compute windowed: it runs on an"):
            dispatch.windowed(torch.zeros(1, 1, 2, 2), [torch.zeros(1, 1)], (1, 1))

    def test_interpreter(self, interpreter):
        assert Triton().can_run(call()) is None
        assert "only for tests" in Triton().better_elsewhere(call())

    def test_package(self, interpreter, monkeypatch):
        backend._package_obstacle.cache_clear()
        monkeypatch.setattr(backend, "find_spec", lambda name: None)
        try:
            assert "pip install triton" in Triton().can_run(call())
        finally:
            backend._package_obstacle.cache_clear()

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"x": torch.zeros(1, 2, 3, 3, dtype=torch.float64)}, "not in torch.float64"),
            ({"table": torch.zeros(8, 169, dtype=torch.float64)}, "not in torch.float64"),
            ({"table": torch.zeros(8, 169, device="meta")}, "a weight on meta"),
            ({"table": torch.zeros(8, 49, 49)}, "holds the matrix itself"),
            ({"window": (57, 7)}, "at most 56 positions a side, and this one is 57x7"),
            ({"x": torch.zeros(1, 1, 1, 1).expand(128, 8, 1500, 1500)}, "in 32 bits"),
            ({"x": torch.zeros(1, 1, 1, 1).expand(65536, 8, 1, 1), "operator": "gated_ffn"}, "65535 samples"),
            ({"x": torch.zeros(1, 1, 1, 1).expand(1, 8, 2048, 2048), "operator": "gated_ffn"}, "has 4194304"),
        ],
    )
    def test_calls(self, change, words, interpreter):
        why = Triton().can_run(call(**change))
        assert words in why
        assert "\n" not in why

    def test_gpus(self, monkeypatch):
        backend._gpu_obstacle.cache_clear()
        try:
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
            assert backend._gpu_obstacle(torch.device("cuda", 0)).endswith("8.0 or later, and this one has 7.5")
            monkeypatch.setattr(torch.version, "hip", "6.0")
            assert "AMD" in backend._gpu_obstacle(torch.device("cuda", 1))
        finally:
            backend._gpu_obstacle.cache_clear()

    def test_first_on_a_gpu(self, monkeypatch):
        """A fake map is enough for the answers. The kernels cannot be tried on it."""
        monkeypatch.setattr(backend, "_gpu_obstacle", lambda device: None)
        monkeypatch.setattr(trial, "DEVICES", ())
        with FakeTensorMode():
            x = torch.empty(2, 8, 9, 10, device="cuda")
            assert dispatch.choose(call(x)).name == "triton"
            with use_backend("reference"):
                assert dispatch.choose(call(x)) is None


class TestFakeCuda:
    """What compilers and the audit of devices see: shapes, types, strides."""

    @pytest.fixture(autouse=True)
    def _needs_triton(self):
        pytest.importorskip("triton")
        if not has_fake_cuda():
            pytest.skip("this PyTorch fakes no CUDA without a driver")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("last", [True, False])
    @pytest.mark.parametrize("local", [True, False])
    def test_product(self, dtype, last, local):
        from wbmm.ops.backends.triton.windowed import table_product

        with FakeTensorMode():
            x = torch.empty(2, 8, 15, 9, device="cuda", dtype=dtype)
            x = x.contiguous(memory_format=torch.channels_last) if last else x
            table, small = torch.empty(8, 729, device="cuda"), torch.empty(8, 169, device="cuda")
            y = table_product(x, table, small if local else None, torch.empty(8, device="cuda"), [14, 14], 1)
        assert (y.device, y.dtype, y.shape, y.stride()) == (x.device, x.dtype, x.shape, x.stride())

    def test_table_gradient(self):
        from wbmm.ops.backends.triton.windowed import table_gradient

        with FakeTensorMode():
            x = torch.empty(2, 8, 15, 9, device="cuda", dtype=torch.bfloat16)
            dtable = table_gradient(x, x, [14, 14])
        assert (dtable.device.type, dtable.dtype, dtable.shape) == ("cuda", torch.float32, (8, 729))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_autocast(self, dtype):
        """`torch.autocast("cuda")` switches itself off where there is no GPU."""
        from wbmm.ops.backends.triton.windowed import table_product

        before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
        try:
            with FakeTensorMode():
                x, table = torch.empty(2, 8, 9, 9, device="cuda"), torch.empty(8, 169, device="cuda")
                assert table_product(x, table, None, None, [7, 7]).dtype == dtype
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])

    @pytest.mark.parametrize("last", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("mixer", [WBMM2d, HierarchicalWBMM2d, MultiKernelWBMM2d])
    def test_backward_of_a_block_on_the_meta_device(self, mixer, dtype, last):
        """Shapes, types and strides of all gradients, at a size that is no multiple of the window."""
        block = Block(mixer(12), 12, drop_path=0.2).to("meta", dtype)
        layout = torch.channels_last if last else torch.contiguous_format
        x = torch.empty(2, 12, 15, 9, device="meta", dtype=dtype).contiguous(memory_format=layout).requires_grad_()
        seen = []
        with dispatch.rehearse("triton"), dispatch.watch(lambda *choice: seen.append(choice[:2])):
            out = block(x)
            out.backward(torch.empty_like(out))
        assert ("windowed", "triton") in seen
        assert ("gated_ffn", "triton") in seen
        assert out.is_contiguous(memory_format=torch.channels_last)
        for tensor in (x, *block.parameters()):
            assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, tensor.dtype)
        assert x.grad.is_contiguous(memory_format=layout) or x.grad.is_contiguous(memory_format=torch.channels_last)

    def test_precision_follows_torch(self):
        from wbmm.ops.backends.triton.windowed import dot_options

        matmul = torch.backends.cuda.matmul
        before = matmul.allow_tf32
        try:
            for allowed, expected in ((True, "tf32"), (False, "tf32x3")):
                matmul.allow_tf32 = allowed
                assert dot_options(torch.zeros(1))["PRECISION"] == expected
        finally:
            matmul.allow_tf32 = before
