"""The small recipe: a table's rows trained from random weights at a size that 2 cores can do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from wbmm.bench.compare import Entry, compare
from wbmm.config_files import SMALL_RECIPES, find_config
from wbmm.paper_tables import Row
from wbmm.train.runs import RunFacts

__all__ = ["Small", "find_recipe", "train_small"]


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
    def deviation(self) -> float | None:
        """Standard deviation over the seeds; one seed has none."""
        return stdev(self.top1) if len(self.runs) > 1 else None

    @property
    def seconds(self) -> float:
        return mean(run.seconds for run in self.runs)


def find_recipe(name: str) -> Path:
    """The file of a small recipe, e.g. of `fashion_mnist`, or any other training configuration."""
    try:
        return find_config(SMALL_RECIPES.get(name, name))
    except ValueError as error:
        raise ValueError(
            f"no recipe {name!r}: expected {', '.join(SMALL_RECIPES)} or a training configuration ({error})"
        ) from None


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
