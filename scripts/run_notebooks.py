"""Runs the notebooks from the first cell to the last and keeps their outputs: `make notebooks`.

    python scripts/run_notebooks.py                               # all of them
    python scripts/run_notebooks.py notebooks/quick_start.ipynb

Each runs in an empty folder. Pictures are stored with 64 colours and paths of this machine are removed. The checksum of
the code is kept, so that a test sees when outputs are older than the code.
"""

import argparse
import base64
import hashlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
KEY = "code_sha256"
COLOURS = 64
TIMEOUT_S = 600


def code_sha256(notebook) -> str:
    """Of the code cells, in order."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def execute(notebook) -> None:
    """Runs all cells in a temporary folder. Raises at the first cell that does."""
    # For `%%bash` cells: the `wbmm` of this interpreter, without colours and moving bars.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ.update(NO_COLOR="1", COLUMNS="120", PYTHONWARNINGS="ignore")
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, timeout=TIMEOUT_S, kernel_name="python3", resources=resources, coalesce_streams=True
        ).execute()
        tidy(notebook, folder)


def tidy(notebook, folder: str) -> None:
    """Small outputs without traces of this machine."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = without_paths(output.text, folder)
            data = output.get("data", {})
            data.pop("image/jpeg", None)
            if "text/plain" in data:
                data["text/plain"] = without_paths(data["text/plain"], folder)
            if "image/png" in data:
                data["image/png"] = shrink(data["image/png"])
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    notebook.metadata[KEY] = code_sha256(notebook)


def without_paths(text: str, folder: str) -> str:
    for path, shown in ((folder, "."), (str(ROOT), "..."), (str(Path.home()), "~")):
        text = text.replace(path, shown)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def shrink(encoded: str) -> str:
    picture, file = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB"), io.BytesIO()
    picture.quantize(COLOURS).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(NOTEBOOKS.glob("*.ipynb")))
    for path in parser.parse_args(argv).notebooks:
        notebook = nbformat.read(path, as_version=4)
        execute(notebook)
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
