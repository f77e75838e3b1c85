import pytest
import torch

pytest_plugins = ["tests.fixtures.training", "tests.fixtures.trained_model", "tests.fixtures.reads"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
