import pytest


@pytest.fixture(autouse=True, scope="session")
def _plain_config_text():
    """mmengine prettifies the configuration's text each time that it is saved, which takes half of a short run."""
    yapf = pytest.importorskip("yapf.yapflib.yapf_api")
    patch = pytest.MonkeyPatch()
    patch.setattr(yapf, "FormatCode", lambda text, **kwargs: (text, True))
    yield
    patch.undo()
