import pytest


@pytest.fixture(autouse=True, scope="session")
def _plain_config_text():
    """mmengine prettifies the configuration's text each time that it is saved, which takes half of a short run."""
    yapf = pytest.importorskip("yapf.yapflib.yapf_api")
    patch = pytest.MonkeyPatch()
    patch.setattr(yapf, "FormatCode", lambda text, **kwargs: (text, True))
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def _runs_of_one_second():
    """mmengine names a run by the second, and a run of the same name logs into the folder of the one before."""
    Runner = pytest.importorskip("mmengine.runner").Runner
    Visualizer = pytest.importorskip("mmengine.visualization").Visualizer
    original = Runner.build_visualizer

    def build(self, *args, **kwargs):
        for kind in (Visualizer, *Visualizer.__subclasses__()):  # each class keeps its own
            kind._instance_dict.clear()
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "build_visualizer", build)
        yield
