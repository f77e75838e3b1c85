"""The speed of this checkout beside another commit's: a process of each in turn, medians of their ratios.

    python scripts/compare_commits.py main                  # is my branch slower?
    python scripts/compare_commits.py v0.1.0 --rounds 7 --cases infer:wbmm_t:16:224 train:wbmm_a:32:56

A case is infer or train, a model, a batch and an image size. Both commits run in this Python with its packages; the
other one is checked out into a temporary folder. Ratios above 1 mean that this checkout is faster.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
CASES = ("infer:wbmm_t:1:224", "infer:wbmm_t:16:224", "infer:wbmm_a:1:224", "train:wbmm_t:8:224", "train:wbmm_a:32:56")
CALLS, SECONDS = 7, 4.0  # of each case in a process, at least: seven calls of 80 ms say little
# What a process of either commit runs: plain PyTorch, so that no bench of ours has to be in both.
DRIVER = """
import json, sys, time
import timm, torch, wbmm

def call(kind, name, batch, size):
    model = timm.create_model(name, num_classes=10).to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    if kind == "infer":
        model = wbmm.fuse(model.eval())
        return torch.inference_mode()(lambda: model(x))
    model.train()
    def step():
        model.zero_grad()
        model(x).square().sum().backward()
    return step

times = {}
for case in sys.argv[3:]:
    kind, name, batch, size = case.split(":")
    run, found = call(kind, name, int(batch), int(size)), []
    begun = time.perf_counter()
    while len(found) < int(sys.argv[1]) + 2 or time.perf_counter() - begun < float(sys.argv[2]):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    times[case] = sorted(found[2:])[len(found[2:]) // 2]
print(json.dumps(times))
"""


def measure(tree: Path, cases: list[str], calls: int, seconds: float) -> dict[str, float]:
    """Seconds of each case in a process that imports `wbmm` from a folder."""
    command = [sys.executable, "-c", DRIVER, str(calls), str(seconds), *cases]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tree)}, cwd=tree, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"compare_commits: {tree.name}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(
    other: Path, cases: list[str], rounds: int, calls: int = CALLS, seconds: float = SECONDS
) -> dict[str, list[float]]:
    """The other tree's time over this one's, for each case and round."""
    ratios = {case: [] for case in cases}
    for i in range(rounds):
        trees = [other, ROOT] if i % 2 == 0 else [ROOT, other]
        times = {tree: measure(tree, cases, calls, seconds) for tree in trees}
        for case in cases:
            ratios[case].append(times[other][case] / times[ROOT][case])
        print(f"round {i + 1} of {rounds}", file=sys.stderr)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what this checkout is compared with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="KIND:MODEL:BATCH:SIZE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "other")
        added = subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, args.commit], cwd=ROOT)
        if added.returncode:
            raise SystemExit(f"compare_commits: {args.commit!r} cannot be checked out: git says why above")
        try:
            ratios = compare(tree, args.cases, args.rounds)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT)
    print("| case | speed of this checkout over the other | lowest and highest |\n| --- | ---: | --- |")
    for case, found in ratios.items():
        print(f"| {case} | {median(found):.2f}x | {min(found):.2f} to {max(found):.2f} |")


if __name__ == "__main__":
    main()
