"""Writes models/: a card for each model and the tables of its README, from wbmm/zoo.yaml and docs/results.

Fills the table in the project's README too.

python tools/make_zoo.py            # after a change in zoo.yaml, in its counts or in docs/results
python tools/make_zoo.py --check    # writes nothing; exit code 1 and the names of the files that are out of date
"""

import argparse
import sys
from pathlib import Path

from wbmm.commands.zoo_cards import make_pages

ROOT = Path(__file__).parents[1]


def main(check: bool, root: Path = ROOT) -> int:
    pages = make_pages(root)
    paths = [root / "README.md", *(root / "models").glob("*.md")]
    there = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    stale = sorted(name for name in pages.keys() | there.keys() if pages.get(name) != there.get(name))
    if check:
        if stale:
            print(f"out of date: {', '.join(stale)}; run: python tools/make_zoo.py", file=sys.stderr)
        return int(bool(stale))
    for name in stale:
        if name in pages:
            (root / name).write_text(pages[name], encoding="utf-8")
        else:
            (root / name).unlink()
    print(f"{len(pages)} pages, {len(stale)} changed")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes the pages of models/ and the table of README.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    sys.exit(main(**vars(parser.parse_args())))
