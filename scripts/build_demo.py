"""Builds the page of docs/demo: the model as ONNX, ONNX Runtime for browsers, and the page, in one folder.

    python scripts/build_demo.py                     # into build/site/demo
    python scripts/build_demo.py --out public/demo
    python -m http.server --directory build/site     # then open http://localhost:8000/demo/

Needs npm for the package onnxruntime-web; its version and checksum are in docs/demo/package-lock.json.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from wbmm.deploy.export import export_model
from wbmm.deploy.predict import class_names
from wbmm.io.files import load_model
from wbmm.models.hub import local_weights

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "demo"
FILES = ("index.html", "demo.css", "demo.js", "pictures.js")
PACKAGE = ("package.json", "package-lock.json", ".npmrc")
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
MODEL = "wbmm_a.tiny50"


def build(out: Path, packages: Path) -> None:
    """Args:
    out: folder of the page, made if missing.
    packages: folder in which npm works; what it installed is used again.
    """
    (out / "ort").mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(PAGE / name, out / name)
    export(out)
    installed = install(packages)
    for name in RUNTIME:
        shutil.copyfile(installed / "dist" / name, out / "ort" / name)


def export(out: Path) -> None:
    """model.onnx, and model.json with what the page needs to know of it."""
    report = export_model(load_model(local_weights(MODEL)), out / "model.onnx", with_preprocess=True, force=True)
    card = report.card
    if card.interpolation != "bicubic" or card.input_size[1] != card.input_size[2]:
        raise ValueError(f"pictures.js resizes bicubically to squares; {MODEL} wants {card.describe_transform()}")
    known = {"model": MODEL, "bytes": report.bytes, "size": card.input_size[1], "crop_pct": card.crop_pct}
    (out / "model.json").write_text(json.dumps({**known, "class_names": class_names(card)}, indent=1) + "\n")


def install(packages: Path) -> Path:
    """The folder of onnxruntime-web, as the lock file says; npm compares checksums."""
    packages.mkdir(parents=True, exist_ok=True)
    installed, lock = packages / "node_modules" / "onnxruntime-web", (PAGE / "package-lock.json").read_text()
    stamp = packages / "installed.json"
    if stamp.is_file() and stamp.read_text() == lock and installed.is_dir():
        return installed
    for name in PACKAGE:
        shutil.copyfile(PAGE / name, packages / name)
    if (npm := shutil.which("npm")) is None:
        raise SystemExit("build_demo.py: npm is not installed; it comes with Node.js")
    done = subprocess.run([npm, "ci"], cwd=packages, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"build_demo.py: npm ci failed\n{done.stderr.strip()}")
    stamp.write_text(lock)
    return installed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site" / "demo")
    parser.add_argument("--packages", type=Path, default=ROOT / "build" / "npm", help="where npm works")
    args = parser.parse_args(argv)
    build(args.out, args.packages)
    print(f"{args.out}: {sum(file.stat().st_size for file in args.out.rglob('*') if file.is_file()) / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
