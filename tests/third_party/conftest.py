import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "backbone.md"


@pytest.fixture
def example():
    """Runs the examples below a heading of docs/backbone.md in one namespace, and returns it."""

    def run(title, skip=0):
        section = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]
        blocks = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        namespace = {"__name__": "example"}
        for block in blocks[: len(blocks) - skip]:
            exec(compile(block, f"{PAGE.name}: {title}", "exec"), namespace)
        return namespace

    return run
