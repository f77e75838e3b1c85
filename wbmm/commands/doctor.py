"""`wbmm doctor`: what is installed, what is usable, and what to install for the rest."""

import argparse
import importlib
import importlib.metadata
import os
import platform
import warnings

from wbmm.extras import PACKAGES, Package, install_command, silence_telemetry
from wbmm.mm import MMCV_HELP, check_mmcv_ops
from wbmm.text import first_line, render_table
from wbmm.version import __version__

EXAMPLE = "wbmm doctor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strict", action="store_true", help="exit with 1 if anything is missing")


def check_package(package: Package) -> tuple[bool, str, str]:
    """(usable, version, what to do)."""
    advice = install_command(package.module) or f"pip install {package.distribution}"
    if package.distribution == "onedl-mmcv":
        advice = MMCV_HELP
    try:
        version = importlib.metadata.version(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        return False, "-", advice
    silence_telemetry()
    try:
        importlib.import_module(package.module)
    except Exception as error:  # a broken install can fail with anything
        return False, version, f"import fails: {first_line(error)}"
    return True, version, ""


def check_backends() -> list[tuple[str, bool, str]]:
    """(name, usable, detail) of what the operator and training can run on."""
    import torch

    cuda = torch.cuda.is_available()
    found = [
        ("cpu", True, f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"),
        ("cuda", cuda, torch.cuda.get_device_name() if cuda else "no CUDA device is visible to torch"),
        ("mps", torch.backends.mps.is_available(), "" if torch.backends.mps.is_available() else "not an Apple GPU"),
    ]
    for name in ("gloo", "nccl"):
        usable = torch.distributed.is_available() and getattr(torch.distributed, f"is_{name}_available")()
        note = "" if name == "gloo" or cuda else "built in, but it needs CUDA devices"
        found.append((name, usable and (name == "gloo" or cuda), note))
    return found


def run(args: argparse.Namespace) -> int:
    warnings.simplefilter("ignore")  # of the packages that are tried here
    print(f"wbmm {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}\n")
    mark = {True: "ok", False: "--"}
    checked = [(package, *check_package(package)) for package in PACKAGES]
    rows = [[p.extra, p.distribution, version, mark[ok], advice] for p, ok, version, advice in checked]
    ops, detail = check_mmcv_ops()
    rows.append(["det", "mmcv operators", "", mark[ops], detail])
    print(render_table(("extra", "package", "version", "", "to do"), rows))
    print()
    print(render_table(("backend", "", ""), [[name, mark[ok], note] for name, ok, note in check_backends()]))
    missing = not ops or not all(ok for _, ok, _, _ in checked)
    return int(missing and args.strict)
