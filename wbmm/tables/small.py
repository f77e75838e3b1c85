"""The small recipe: a table's rows trained from random weights at a size that 2 cores can do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from wbmm.bench.compare import Entry, compare
from wbmm.train.runs import RunFacts

from .rows import Row

__all__ = ["Small", "find_recipe", "train_small"]

RECIPES = Path("configs/ablations")


@dataclass(frozen=True)
class Small:
    """The runs of one row, one a seed."""

    runs: tuple[RunFacts, ...]

    @property
    def top1(self) -> list[float]:
        """After the last epoch, not the best one."""
        return [run.final["top1"] for run in self.runs]

    @property
    def mean(self) -> float:
        return mean(self.top1)

    @property
    def spread(self) -> float | None:
        """Highest less lowest; one seed has none."""
        return max(self.top1) - min(self.top1) if len(self.runs) > 1 else None

    @property
    def seconds(self) -> float:
        return mean(run.seconds for run in self.runs)


def find_recipe(name: str) -> Path:
    """A YAML file, or the base of the rows' files under `configs/ablations/<name>` in the checkout."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / name / "_base.yaml"
    if not path.is_file():
        known = sorted(base.parent.name for base in RECIPES.glob("*/_base.yaml"))
        expected = f"one of {', '.join(known)}" if known else "to run in the checkout (configs/ablations is not here)"
        raise ValueError(
            f"no recipe {name!r} ({path} is not there): expected {expected}, or a YAML file such as configs/digits.yaml"
        )
    return path


def train_small(
    rows: Sequence[Row], recipe: Path, seeds: int, out: Path, overrides: Sequence[str] = ()
) -> dict[str, Small] | None:
    """Trains what is not trained yet; None if a signal stopped it.

    LKA rows are left out: the package changes how a net is run, not the net.

    Args:
        rows: of one table.
        recipe: a training configuration; each row brings its model.
        seeds: how many, from 0.
        out: folder of the runs.
        overrides: `key=value` changes to the recipe.
    """
    entries = [Entry(row.id, row.small_model, row.small_args) for row in rows if not row.large_kernel]
    runs = compare(recipe, entries, range(seeds), out, overrides)
    return None if runs is None else {row_id: Small(tuple(facts)) for row_id, facts in runs.items()}
