"""Every model, form, mixer and precision on fake CUDA tensors: devices and dtypes as on a GPU, no GPU needed.

Fake tensors have a device, a dtype and a shape but no values. A tensor that is made on the wrong device, or a product
of two dtypes, is an error here as it would be there.
"""

from contextlib import contextmanager

import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import wbmm
from tests.helpers import has_fake_cuda
from wbmm.models.named_mixers import MIXERS

pytestmark = pytest.mark.skipif(not has_fake_cuda(), reason="this PyTorch fakes no CUDA without a driver")
CUDA = torch.device("cuda", 0)
SIZES = [(64, 64), (90, 70)]  # whole windows in some stages, and in none
SMALL = {"dims": (40, 40, 80, 80), "depths": (1, 2, 2, 1), "pattern": ("D", "WD", "WD", "W")}
MODELS = ["wbmm_a", "wbmm_a_dense", "wbmm_a_hier", "wbmm_p", "unireplknet_a", "convnext_atto_wbmm"]
FORMS = ["training", "compact", "dense"]
PRECISIONS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "autocast-bfloat16": (torch.float32, torch.bfloat16),
    "autocast-float16": (torch.float32, torch.float16),
}


@contextmanager
def autocast(dtype):
    """`torch.autocast("cuda")` turns itself off where there is no GPU: this is what it would set."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or before[1])
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.clear_autocast_cache()


def run(name, form, precision, **kwargs):
    """One forward pass at each size; the dtypes of the linears' outputs."""
    dtype, cast = PRECISIONS[precision]
    model = timm.create_model(name, device=torch.device("meta"), dtype=dtype, num_classes=5, **kwargs).eval()
    if form != "training":
        model = wbmm.fuse(model, form)
    seen = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), autocast(cast):
            model = model.to_empty(device=CUDA)
            for size in SIZES:
                for layout in (torch.channels_last, torch.contiguous_format):
                    images = torch.empty(2, 3, *size, dtype=dtype, device=CUDA).contiguous(memory_format=layout)
                    out = model(images)
                    assert out.shape == (2, 5)
                    assert out.device == CUDA
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
    return seen


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_models(name, form, precision):
    dtype, cast = PRECISIONS[precision]
    assert run(name, form, precision) == {cast or dtype}


@pytest.mark.parametrize("precision", ["bfloat16", "autocast-bfloat16"])
@pytest.mark.parametrize("form", ["training", "compact"])
@pytest.mark.parametrize("mixer", [*MIXERS, "dw5"])
def test_mixers(mixer, form, precision):
    dtype, cast = PRECISIONS[precision]
    assert run("wbmm_a", form, precision, mixer=mixer, **SMALL) == {cast or dtype}


def test_the_harness_sees_a_tensor_on_the_wrong_device():
    with FakeTensorMode(), pytest.raises(RuntimeError, match=r"cuda:0.*cpu|cpu.*cuda:0"):
        torch.empty(2, device=CUDA) + torch.empty(2)
