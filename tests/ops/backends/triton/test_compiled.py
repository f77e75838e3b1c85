"""Every kernel compiled for real GPUs, without one: registers, spills and shared memory."""

import os
import re
import subprocess

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from wbmm.ops.backends.triton import ffn, residual, windowed  # noqa: E402

BIN = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
# By compute capability: the assembler, its name of the target, the bytes of shared memory that a program can have.
TARGETS = {
    80: ("ptxas", "sm_80", 163 * 1024),
    90: ("ptxas", "sm_90a", 227 * 1024),
    120: ("ptxas-blackwell", "sm_120a", 99 * 1024),
}
# An older Triton brings no assembler for the newest target.
TARGETS = {key: target for key, target in TARGETS.items() if os.path.exists(os.path.join(BIN, target[0]))}
# With an older Triton the first call on a GPU finds out, and the next backend computes it (`trial.py`).
RECENT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
LAYOUTS = {"channels-last": "stride_c", "contiguous": "stride_w"}  # the stride that is 1
TYPES = {"tf32": ("fp32", "tf32"), "ieee": ("fp32", "tf32x3"), "bf16": ("bf16", "tf32x3"), "fp16": ("fp16", "tf32x3")}
POINTERS = {"table", "local_table", "bias", "partial", "dtable", "scale", "beta", "slope", "factor"}
POINTERS |= {"mean", "rstd", "keep", "means", "deviations", "sums", "products", "level"}
FLAGS = ("MEAN", "FACTOR", "BIAS", "KEEP", "SHORTCUT", "NORM", "BATCH")
FFN_KERNELS = [
    ffn.squares_kernel,
    ffn.scale_kernel,
    ffn.scale_backward_kernel,
    ffn.hidden_backward_kernel,
    residual.moments_kernel,
    residual.finish_kernel,
    residual.sums_kernel,
    residual.finish_backward_kernel,
]


def compiled(kernel, capability, maps, kind, constants, options, layout=None):
    """Checks one configuration; returns its PTX.

    Args:
        maps: the arguments that point to maps, of the type `kind`.
        layout: one of `LAYOUTS`.
    """
    constants = dict(constants)
    aligned = [name for name in kernel.arg_names if name in maps or name in POINTERS]
    aligned += ["channels"] if layout != "contiguous" and "channels" in kernel.arg_names else []
    if layout is not None:
        constants[LAYOUTS[layout]] = 1
        if layout == "channels-last":
            aligned += ["stride_b", "stride_h", "stride_w"]
    signature = dict.fromkeys(kernel.arg_names, "i32")
    signature |= dict.fromkeys(POINTERS, "*fp32") | dict.fromkeys(maps, f"*{kind}")
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    position = kernel.arg_names.index
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(position(name),): value for name, value in constants.items()},
        attrs={(position(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assembler, target, limit = TARGETS[capability]
    assert binary.metadata.shared <= limit
    run = subprocess.run(
        [os.path.join(BIN, assembler), "-v", f"--gpu-name={target}", "-o", os.devnull, "-"],
        input=binary.asm["ptx"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    registers = int(re.search(r"Used (\d+) registers", run.stderr)[1])
    assert registers * 32 * options["num_warps"] <= 65536, "a program fits a multiprocessor"
    spilled = re.findall(r"(\d+) bytes spill", run.stderr)
    assert spilled, run.stderr
    assert set(spilled) == {"0"}, f"{registers} registers, {run.stderr}"
    return binary.asm["ptx"]


def product(capability, config, kind, layout, window=(14, 14), local=True):
    kind, precision = TYPES[kind]
    constants = {**config.kwargs, "BI": windowed.STEP, "WH": window[0], "WW": window[1], "LOCAL": local}
    constants |= {"SHORTCUTS": 1, "BIAS": True, "PRECISION": precision, "UPCAST": False}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return compiled(windowed.product_kernel, capability, ("x", "y"), kind, constants, options, layout)


def gradient(capability, kind, layout, window):
    meta = windowed.gradient_meta(torch.float32 if TYPES[kind][0] == "fp32" else torch.float16)
    options = {name: meta.pop(name) for name in ("num_warps", "num_stages")}
    kind, precision = TYPES[kind]
    constants = {**meta, "WH": window[0], "WW": window[1], "ROWS": windowed.block_rows(window)}
    constants |= {"PRECISION": precision, "UPCAST": False}
    return compiled(windowed.gradient_kernel, capability, ("x", "grad"), kind, constants, options, layout)


def collapse(capability, window):
    rows = windowed.block_rows(window)
    constants = {"WH": window[0], "WW": window[1], "ROWS": rows, "BO": windowed.OFFSET_BLOCK}
    constants["BJ"] = triton.next_power_of_2(rows * window[1])
    options = {"num_warps": 4, "num_stages": 3}
    return compiled(windowed.collapse_kernel, capability, (), "fp32", constants, options)


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("config", windowed.PRODUCT_CONFIGS, ids=str)
def test_product(capability, config):
    """The hierarchical 14x14 with bias and shortcut needs the most registers."""
    for layout in LAYOUTS:
        for kind in ("tf32", "ieee", "bf16"):
            ptx = product(capability, config, kind, layout)
            assert "mma.sync" in ptx or "wgmma" in ptx, "on tensor cores"
            assert "fma.rn.f32" not in ptx


@pytest.mark.skipif(not RECENT, reason="Triton 3.5 fails to compile this kernel")
@pytest.mark.parametrize("capability", TARGETS)
def test_table_gradient(capability):
    for window in ((7, 7), (14, 14)):
        for layout in LAYOUTS:
            for kind in ("tf32", "bf16"):
                ptx = gradient(capability, kind, layout, window)
                assert "atom." not in ptx
                assert "red.global" not in ptx
        collapse(capability, window)


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("kernel", FFN_KERNELS, ids=lambda kernel: kernel.__name__)
def test_feed_forward(capability, kernel):
    meta = {**ffn.META, **{name: True for name in FLAGS if name in kernel.arg_names}}
    options = {"num_warps": meta.pop("num_warps")}
    maps = [name for name in kernel.arg_names if name in ("h", "v", "dv", "y", "out", "shortcut", "grad", "dy")]
    for kind in ("fp32", "bf16", "fp16"):
        ptx = compiled(kernel, capability, maps, kind, meta, options)
        assert "atom." not in ptx


@pytest.mark.heavy
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("window", [(7, 7), (7, 14), (14, 14), (28, 28), (56, 56)], ids=str)
def test_every_window_type_and_layout(capability, window):
    for layout in LAYOUTS:
        for kind in TYPES:
            for config in windowed.PRODUCT_CONFIGS:
                for local in (False, window[0] % 2 == 0 and window[1] % 2 == 0):
                    product(capability, config, kind, layout, window, local)
            gradient(capability, kind, layout, window)
    collapse(capability, window)
