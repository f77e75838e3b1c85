"""Writes configs/ablations from wbmm/tables/tables.yaml.

python tools/write_ablations.py
"""

from pathlib import Path

from wbmm.tables.configs import write_ablations

if __name__ == "__main__":
    for path in write_ablations(Path(__file__).parents[1] / "configs" / "ablations"):
        print(path)
