import pytest

import wbmm
from wbmm.io.files import save_model


@pytest.fixture(scope="session")
def forms(trained, tmp_path_factory):
    """Form -> a file of the small trained model in it."""
    folder = tmp_path_factory.mktemp("forms")
    found = {"training": save_model(trained, folder / "training.pth")}
    for form in ("compact", "dense"):
        fused = wbmm.fuse(trained, form)
        fused.card = trained.card
        found[form] = save_model(fused, folder / f"{form}.safetensors")
    return found
