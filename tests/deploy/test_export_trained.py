"""A model trained here, exported: the same predictions on five hundred real images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")
pytest.importorskip("sklearn")

import wbmm
from wbmm.deploy.export import export_model
from wbmm.deploy.runtime import open_runner
from wbmm.train.config import load_config
from wbmm.train.fit import fit

DIGITS = Path(__file__).parents[2] / "configs" / "digits.yaml"


@pytest.mark.heavy
def test_predictions_are_identical(tmp_path):
    from sklearn.datasets import load_digits

    args = "model.args={dims: [16, 32, 64, 128], ls_init_value: 0.1}"
    result = fit(load_config(DIGITS, [f"out={tmp_path / 'run'}", args, "schedule.epochs=3"]))
    assert result.metrics["top1"] > 80
    model = wbmm.load_model(tmp_path / "run" / "last.pt")
    transform = model.card.transform()
    digits = load_digits().images[:500] * 255 / 16
    images = torch.stack([transform(Image.fromarray(digit.astype(np.uint8))) for digit in digits])
    with torch.no_grad():
        expected = torch.cat([model(batch) for batch in images.split(50)])
    first, second = expected.topk(2).values.T
    clear = first - second > 1e-3
    assert clear.sum() > 490
    for suffix in (".onnx", ".xml", ".pt2"):
        export_model(model, tmp_path / f"net{suffix}", dynamic_batch=True)
        logits = torch.cat([open_runner(tmp_path / f"net{suffix}")(batch) for batch in images.split(50)])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        assert torch.equal(logits.argmax(1)[clear], expected.argmax(1)[clear])
