"""Bytes and multiply-adds of modules whose cost is known by hand."""

import pytest
import timm
import torch
import torch.nn as nn

from wbmm import cli
from wbmm.bench.roofline import GPUS, by_operator, issued, paper_rows, parts, record, units
from wbmm.layers import Block, WBMM2d
from wbmm.models.fuse import fuse

META = torch.device("meta")


def total(kernels):
    return sum(kernel.bytes for kernel in kernels), sum(kernel.macs for kernel in kernels)


def test_a_linear_reads_and_writes_each_tensor_once():
    linear = nn.Linear(8, 16, device=META)
    assert total(record(linear, torch.empty(4, 8, device=META))) == (4 * (4 * 8 + 8 * 16 + 16 + 4 * 16), 4 * 8 * 16)


def test_views_are_free_and_a_tensor_read_twice_counts_once():
    class Square(nn.Module):
        def forward(self, x):
            x = x.permute(1, 0).reshape(2, -1)[None]
            return x * x

    (kernel,) = [k for k in record(Square(), torch.empty(2, 2, device=META)) if k.operator == "mul"]
    assert kernel.bytes == 2 * 4 * 4


def test_the_backward_pass_of_a_depthwise_convolution():
    conv = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False, device=META)
    x = torch.empty(2, 6, 5, 5, device=META)
    forward = 2 * 6 * 25 * 9
    assert total(record(conv, x))[1] == forward
    assert total(record(conv, x, training=True))[1] == 3 * forward


def test_a_block_moves_what_the_design_says():
    """A W block at C = 80, 56x56, batch 128, forward and backward: 26.6 GB when GPUs were first looked at.

    Since then GRN's norm does not write the squares of the hidden layer (1.03 GB), and paddings by nothing, which are
    not issued, are not counted (four copies of the map, 1.03 GB).
    """
    block, x = w_block()
    squares, paddings = 2 * x.numel() * 4 * 4 / 1e9, 4 * 2 * x.numel() * 4 / 1e9
    assert total(record(block, x, training=True))[0] / 1e9 == pytest.approx(26.6 - squares - paddings, rel=0.02)


def w_block():
    x = torch.empty(128, 80, 56, 56, device=META, memory_format=torch.channels_last)
    return Block(WBMM2d(80, 7), 80).to(META), x


def test_the_kernels_of_the_triton_backend():
    """Each reads and writes its maps once; the hidden layer is four times as wide as the map."""
    pytest.importorskip("triton")
    block, x = w_block()
    kernels = record(block, x, training=True, backend="triton")
    a_map, hidden = x.numel() * 4, 4 * x.numel() * 4
    moved = {
        "product_kernel": [2 * a_map, 2 * a_map],  # forward, and the gradient of the map
        "gradient_kernel": [2 * a_map],
        "squares_kernel": [hidden],
        "scale_kernel": [2 * hidden],
        "scale_backward_kernel": [3 * hidden],
        "hidden_backward_kernel": [3 * hidden],
        "moments_kernel": [a_map],
        "finish_kernel": [3 * a_map],
        "sums_kernel": [2 * a_map],
        "finish_backward_kernel": [3 * a_map],
    }
    for name, expected in moved.items():
        found = [kernel.bytes for kernel in kernels if kernel.operator == name]
        assert found == pytest.approx(expected, rel=0.1), name
    (forward, backward) = (kernel.macs for kernel in kernels if kernel.operator == "product_kernel")
    assert forward == backward == x.numel() * 49
    products = sum(kernel.macs for kernel in kernels if kernel.operator == "mm")
    assert products == pytest.approx(6 * x.numel() * 320, rel=1e-3)
    assert not any(kernel.operator.startswith("wbmm") for kernel in kernels)
    plain = record(block, x, training=True)
    assert total(kernels)[0] < 0.6 * total(plain)[0]
    assert plain == record(block, x, training=True), "gradients of one pass are not added to those of the next"


def test_the_units_of_a_model_are_all_of_it():
    model = timm.create_model("wbmm_a", device=META).eval()
    images = torch.empty(2, 3, 64, 64, device=META)
    names = [unit.name for unit in units(fuse(model), images)]
    blocks = [name for name, module in model.named_modules() if isinstance(module, Block)]
    assert [name for name in names if "blocks" in name] == blocks
    found = issued(model, images, training=False)
    whole = parts(found, GPUS["a100"], "tf32")
    assert sum(part.count for part in whole[:-1]) == len(names)
    assert sum(len(kernels) for _, kernels in by_operator(found)) == whole[-1].kernels
    assert [unit.name for unit in units(timm.create_model("convnext_atto", device=META), images)] == ["whole model"]


def test_the_time_is_the_larger_of_both_limits():
    gpu = GPUS["a100"]
    assert gpu.seconds(gpu.bandwidth * 1e9, 0, "tf32") == 1
    assert gpu.seconds(0, gpu.tflops["tf32"] * 1e12 / 2, "tf32") == 1
    assert gpu.seconds(gpu.bandwidth * 1e9, gpu.tflops["tf32"] * 1e12, "tf32") == 2


def test_the_papers_operator_moves_a_tenth_of_what_its_gpu_can():
    shares = [float(row[5].rstrip("%")) for row in paper_rows(128) if row[0] == "WBMM-C 7x7"]
    assert len(shares) == 6
    assert 9 < min(shares) <= max(shares) < 15


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["wbmm_a", "--training"], "images/s (reference) and "),
        (["wbmm_a_hier", "--precision", "bf16", "--backend", "reference"], "images/s (reference)."),
        (["wbmm_a", "--backend", "triton", "--kernels"], "x product_kernel"),
        (["resnet10t"], "has no operators that the backend triton computes"),
        (["--paper"], "WBMM-NC 14x14"),
    ],
)
def test_the_command(arguments, named, capsys):
    pytest.importorskip("triton")
    assert cli.main(["bench", "roofline", *arguments]) == 0
    said = capsys.readouterr().out
    assert "not measured" in said
    assert named in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["wbmm_q"], "wbmm_q"),
        (["wbmm_a", "--batch", "0"], "--batch 0"),
        (["--paper", "--batch", "3"], "4, 16, 64"),
        (["wbmm_a", "--kernels"], "--backend triton"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, named, capsys):
    assert cli.main(["bench", "roofline", *arguments]) == 1
    assert named in capsys.readouterr().err
