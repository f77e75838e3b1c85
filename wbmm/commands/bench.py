"""`wbmm bench`: what to measure is its first argument."""

import argparse
import importlib

BENCHES = {
    "model": "wbmm.bench.models",
    "train": "wbmm.bench.train",
    "runtime": "wbmm.bench.runtime",
    "paths": "wbmm.bench.paths",
    "profile": "wbmm.bench.profile",
    "seg": "wbmm.bench.seg",
    "det": "wbmm.bench.det",
    "memory": "wbmm.bench.memory",
    "roofline": "wbmm.bench.roofline",
}
EXAMPLE = "wbmm bench model wbmm_t:compact convnext_tiny --batch 1 16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="{" + ",".join(BENCHES) + "}")
    for name, module_name in BENCHES.items():
        module = importlib.import_module(module_name)
        module.add_arguments(
            kinds.add_parser(
                name,
                description=module.__doc__,
                epilog=f"example:\n  {module.EXAMPLE}",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )


def run(args: argparse.Namespace) -> int:
    return importlib.import_module(BENCHES[args.bench]).run(args)
