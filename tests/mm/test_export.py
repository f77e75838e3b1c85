"""A whole UPerNet and a detector's backbone and neck, exported and compared with mmseg's and mmdet's own passes."""

import pytest
import torch

pytest.importorskip("mmseg")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from tests.helpers import randomize
from wbmm import cli
from wbmm.deploy.runtime import open_runner
from wbmm.mm.networks import build_detector, build_segmentor

BACKBONE = (
    'dict(type="WBMMBackbone", arch="wbmm_a_hier", dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), pattern=tuple("WDWW"))'
)
SEGMENTOR = f"""
default_scope = "mmseg"
norm_cfg = dict(type="SyncBN", requires_grad=True)
pools = (1, 2, 3, 6)
head = dict(channels=16, num_classes=4, norm_cfg=norm_cfg, align_corners=False,
            loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False))
model = dict(
    type="EncoderDecoder",
    data_preprocessor=dict(type="SegDataPreProcessor", mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375],
                           bgr_to_rgb=True, size=(96, 128)),
    backbone={BACKBONE},
    decode_head=dict(type="UPerHead", in_channels=[8, 8, 16, 16], in_index=[0, 1, 2, 3], pool_scales=pools, **head),
    auxiliary_head=dict(type="FCNHead", in_channels=16, in_index=2, num_convs=1, concat_input=False, **head),
    train_cfg=dict(),
    test_cfg=dict(mode="whole"),
)
"""
DETECTOR = f"""
default_scope = "mmdet"
model = dict(
    type="RetinaNet",
    data_preprocessor=dict(type="DetDataPreprocessor", mean=[10.0, 20.0, 30.0], std=[1.0, 2.0, 3.0], bgr_to_rgb=False,
                           pad_size_divisor=32),
    backbone={BACKBONE},
    neck=dict(type="FPN", in_channels=[8, 8, 16, 16], out_channels=8, num_outs=5),
    bbox_head=dict(type="RetinaHead", num_classes=3, in_channels=8, feat_channels=8, stacked_convs=1,
                   anchor_generator=dict(type="AnchorGenerator", octave_base_scale=4, scales_per_octave=1, ratios=[1.0],
                                         strides=[4, 8, 16, 32, 64])),
    test_cfg=dict(),
)
"""


def prepare(folder, text, build):
    """A configuration, a checkpoint, and the model."""
    (folder / "config.py").write_text(text)
    model = randomize(build(folder / "config.py")).eval()
    for module in model.modules():  # with a norm's weight around 0, as some come, little of the image would pass
        if isinstance(module, torch.nn.BatchNorm2d | torch.nn.LayerNorm) and module.weight.mean() < 0.5:
            module.weight.data += 1
    meta = {"dataset_meta": {"classes": ("wall", "floor", "sky", "tree")}}
    torch.save({"meta": meta, "state_dict": model.state_dict()}, folder / "net.pth")
    return model


def export(folder, *options, checkpoint="net.pth"):
    return cli.main(["export", str(folder / checkpoint), *options, "--config", str(folder / "config.py")])


@torch.no_grad()
def segment(model, x):
    metas = [{"img_shape": x.shape[2:], "ori_shape": x.shape[2:], "pad_shape": x.shape[2:]}] * len(x)
    return model.inference(x, metas)


def check_segmentor(folder, path, shapes, options):
    model = prepare(folder, SEGMENTOR, build_segmentor)
    assert export(folder, str(path), *options) == 0
    runner = open_runner(path)
    assert (runner.card.kind, runner.card.num_classes, runner.card.input_size) == ("segmentor", 4, (3, 96, 128))
    assert runner.card.class_names == ["wall", "floor", "sky", "tree"]
    assert runner.card.mean[0] == pytest.approx(0.485)
    for shape in shapes:
        x = torch.randn(shape)
        expected = segment(model, x)
        assert expected.shape == (shape[0], 4, *shape[2:])
        torch.testing.assert_close(runner(x), expected, rtol=0, atol=1e-4)
        assert expected.std((2, 3)).max() > 2e-2, "the logits say nothing about the image"
    return runner


def test_a_segmentor_of_any_batch(tmp_path):
    shapes = [(1, 3, 96, 128), (3, 3, 96, 128)]
    runner = check_segmentor(tmp_path, tmp_path / "net.onnx", shapes, ["--dynamic-batch"])
    assert (runner.batch, runner.size) == (None, (96, 128))


@pytest.mark.heavy
@pytest.mark.parametrize("suffix", [".onnx", ".xml", ".pt2"])
def test_a_segmentor_of_any_size(suffix, tmp_path):
    shapes = [(1, 3, 96, 128), (3, 3, 224, 224), (2, 3, 250, 333), (1, 3, 40, 90), (1, 3, 512, 512)]
    runner = check_segmentor(tmp_path, tmp_path / f"net{suffix}", shapes, ["--dynamic-batch", "--dynamic-size"])
    assert (runner.batch, runner.size) == (None, None)


def test_a_segmentors_backbone_with_bytes_as_input(tmp_path):
    model = prepare(tmp_path, SEGMENTOR, build_segmentor)
    assert export(tmp_path, "--format", "onnx", "--features", "--with-preprocess") == 0
    runner = open_runner(tmp_path / "net.onnx")
    assert (runner.card.kind, runner.size) == ("features", (96, 128))
    x = torch.randint(0, 256, (1, 3, 96, 128), dtype=torch.uint8)
    with torch.no_grad():
        # mmseg's own preprocessing takes BGR
        inputs = model.data_preprocessor({"inputs": [x[0].flip(0)], "data_samples": None})["inputs"]
        expected = model.extract_feat(inputs)
    torch.testing.assert_close(runner(x), list(expected), rtol=1e-4, atol=1e-4)


def test_a_detectors_backbone_and_neck(tmp_path, capsys):
    pytest.importorskip("mmdet")
    pytest.importorskip("mmcv.ops")
    import onnxruntime

    model = prepare(tmp_path, DETECTOR, build_detector)
    options = ["--format", "onnx", "--neck", "--size", "96", "160", "--dynamic-batch"]
    assert export(tmp_path, *options) == 0, capsys.readouterr().err
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    assert [output.name for output in session.get_outputs()] == ["p2", "p3", "p4", "p5", "p6"]
    runner = open_runner(tmp_path / "net.onnx")
    assert (runner.card.kind, runner.batch, runner.size) == ("detector", None, (96, 160))
    x = torch.randn(2, 3, 96, 160)
    with torch.no_grad():
        expected = model.extract_feat(x.flip(1))  # it was configured for BGR; files take RGB
    torch.testing.assert_close(runner(x), list(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("suffix", [".onnx", ".xml", ".pt2"])
def test_a_detectors_maps_at_any_size(suffix, tmp_path):
    model = prepare(tmp_path, DETECTOR, build_detector)
    path = tmp_path / f"net{suffix}"
    assert export(tmp_path, str(path), "--neck", "--size", "96", "160", "--dynamic-batch", "--dynamic-size") == 0
    runner = open_runner(path)
    for shape in [(1, 3, 96, 160), (2, 3, 97, 131), (1, 3, 65, 224), (1, 3, 256, 320)]:
        x = torch.randn(shape)
        with torch.no_grad():
            expected = model.extract_feat(x.flip(1))
        torch.testing.assert_close(runner(x), list(expected), rtol=1e-4, atol=1e-4)


def test_refusals(tmp_path, capsys):
    prepare(tmp_path, SEGMENTOR, build_segmentor)
    contents = torch.load(tmp_path / "net.pth")
    del contents["state_dict"]["decode_head.conv_seg.weight"]
    torch.save(contents, tmp_path / "cut.pth")
    assert export(tmp_path, "--format", "onnx", checkpoint="cut.pth") == 1
    assert "does not fit the configuration" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "net.pth"), "--format", "onnx"]) == 1
    assert "which needs its configuration (--config FILE)" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.onnx"))
