"""The released code's outputs, reproduced from its key names; and how sensitive the check is."""

import pytest
import timm
import torch

import wbmm
from tests.reference import image, released_fused_state_dict, released_logits, released_state_dict
from wbmm import ops

CASES = ["wbmm_p", "wbmm_t_dense", "wbmm_t_dense_odd"]
RELEASED = ["wbmm_p", "wbmm_n", "wbmm_t", "wbmm_s", "wbmm_t_dense", "wbmm_s_dense"]


def load(case):
    name = case.removesuffix("_odd")
    model = timm.create_model(name).eval()
    model.load_state_dict(released_state_dict(name))
    return model


def difference(model, case):
    size, expected = released_logits(case)
    with torch.no_grad():
        return (model(image(*size)) - expected).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_logits_of_the_released_code(case):
    model = load(case)
    assert difference(model, case) < 1e-5
    assert difference(wbmm.fuse(model), case) < 1e-5
    assert difference(wbmm.fuse(model, "dense"), case) < 1e-5
    assert difference(timm.utils.reparameterize_model(model), case) < 1e-5


def test_a_transposed_index_would_fail():
    model = load("wbmm_p")
    for module in model.modules():
        if hasattr(module, "index"):
            module.index = module.index.t()
    with ops.use_backend("reference"):  # a backend need not look at the index
        assert difference(model, "wbmm_p") > 1e-3


@pytest.mark.parametrize("kind", ["BatchNorm2d", "LayerNorm2d", "GlobalResponseNorm"])
def test_a_wrong_eps_would_fail(kind):
    model = load("wbmm_p")
    touched = 0
    for module in model.modules():
        if type(module).__name__ == kind:
            module.eps, touched = 1e-3, touched + 1
    assert touched
    assert difference(model, "wbmm_p") > 1e-5


@pytest.mark.parametrize("wrap", [lambda sd: sd, lambda sd: {"model": sd}], ids=["bare", "wrapped"])
@pytest.mark.parametrize("changes", [{}, {"num_classes": 5}, {"in_chans": 1}])
def test_a_released_hub_file_through_timm(monkeypatch, wrap, changes):
    """The download is replaced by what it would return; the rest is timm's own path."""
    released = released_state_dict("wbmm_p")
    asked = []

    def download(hub_id, filename=None, **kwargs):
        asked.append((hub_id, filename))
        return wrap(dict(released))

    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", download)
    monkeypatch.setattr("wbmm.models.hub.try_to_load_from_cache", lambda *_: "/cached")
    model = timm.create_model("wbmm_p", pretrained=True, **changes)
    assert asked == [("wansong-s/WBMM", "wbmm_p_in1k_224_w7.pth")]
    table = released["stages.1.0.dwconv.relative_position_bias_table"]
    torch.testing.assert_close(model.stages[1].blocks[0].mixer.table.data, table)
    assert model.head.fc.out_features == changes.get("num_classes", 1000)


@pytest.mark.parametrize("name", RELEASED)
def test_every_released_key_is_used(name):
    """Strictly: nothing missing, nothing left over, every shape right."""
    with torch.device("meta"):
        state_dict = {k: torch.empty(v.shape, dtype=v.dtype) for k, v in released_state_dict(name).items()}
    model = timm.create_model(name, device="meta")
    result = model.load_state_dict(state_dict, assign=True)
    assert not result.missing_keys
    assert not result.unexpected_keys


def test_inside_any_container():
    class Segmentor(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = timm.create_model("wbmm_p", num_classes=0, global_pool="")
            self.decode_head = torch.nn.Conv2d(512, 2, 1)

    released = {
        f"backbone.{k}": v for k, v in released_state_dict("wbmm_p").items() if not k.startswith(("head", "norm"))
    }
    released["backbone.norm.weight"] = torch.ones(512)
    released["backbone.norm.bias"] = torch.zeros(512)
    released["decode_head.weight"], released["decode_head.bias"] = torch.ones(2, 512, 1, 1), torch.zeros(2)
    segmentor = Segmentor()
    segmentor.load_state_dict(released)
    expected = released["backbone.stages.1.0.dwconv.relative_position_bias_table"]
    torch.testing.assert_close(segmentor.backbone.stages[1].blocks[0].mixer.table.data, expected)


def test_through_mmengine_loader():
    loader = pytest.importorskip("mmengine.runner.checkpoint").load_state_dict
    model = timm.create_model("wbmm_p")
    released = released_state_dict("wbmm_p")
    loader(model, dict(released), strict=True)
    torch.testing.assert_close(
        model.stages[3].blocks[1].mixer.kernels["5"].data, released["stages.3.1.dwconv.dwconv5.weight"]
    )


@pytest.mark.parametrize(("form", "leaf"), [("compact", "R_fused"), ("dense", "M_fused")])
def test_a_released_fused_checkpoint_loads_into_the_fused_model(form, leaf):
    released = released_fused_state_dict(wbmm.fuse(load("wbmm_p"), form))
    assert f"stages.3.0.dwconv.{leaf}" in released
    target = wbmm.fuse(timm.create_model("wbmm_p").eval(), form)
    target.load_state_dict(released)
    assert difference(target, "wbmm_p") < 1e-5
    with pytest.raises(RuntimeError, match=rf"looks like wbmm_p .fused, {form} form"):
        timm.create_model("wbmm_p").load_state_dict(released)


def test_the_operator_is_what_the_paper_writes():
    """Y = X M with M = R[:, I], spelt out for one window."""
    table, x = torch.randn(2, 169), torch.randn(1, 2, 7, 7)
    index = ops.relative_index((7, 7))
    expected = torch.einsum("bci,cij->bcj", x.flatten(2), table[:, index.flatten()].view(2, 49, 49)).view_as(x)
    torch.testing.assert_close(ops.windowed(x, [table], (7, 7)), expected)
