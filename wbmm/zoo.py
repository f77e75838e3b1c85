"""The zoo, read from `zoo.yaml`: names, tasks, architectures, the paper's figures, configs and weights.

`zoo_counts.yaml` beside it holds what was counted of each model: a listing need not build them.
"""

from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import resources
from pathlib import Path

import yaml

__all__ = ["ZooModel", "load_counts", "load_zoo", "weights_folder"]

PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class ZooModel:
    """One model of the zoo.

    Attributes:
        name: its name in timm's registry.
        task: `classification`, `dense` (all 7x7), `hierarchical` or `baseline`.
        dims: channels of each stage.
        pattern: blocks of each stage, a letter a block.
        window: window of each stage, for WBMM.
        mixer: what stands in W blocks.
        paper: what the paper prints: `params` (M), `flops` (G), `top1` (%), `table`.
        weights: tag to `{hub, file}`, and `sha256` of the file where it is known. Or, for a file that comes with the
            project, to `{local: file}` with what timm says of it: `num_classes`, `size` of the images, and `mean`,
            `std`, `crop_pct` or `interpolation` where they are not ImageNet's.
        config: the training configuration, relative to the project's root.
    """

    name: str
    task: str
    dims: tuple[int, ...]
    pattern: tuple[str, ...]
    window: tuple[int | str, ...] = (7, 7, 7, 7)
    mixer: str = "wbmm"
    paper: dict = field(default_factory=dict)
    weights: dict = field(default_factory=dict)
    config: str | None = None


@lru_cache(maxsize=1)
def load_zoo() -> dict[str, ZooModel]:
    """Every model of the zoo by name, in the file's order."""
    text = resources.files("wbmm").joinpath("zoo.yaml").read_text(encoding="utf-8")
    known = {f.name for f in fields(ZooModel)} - {"name"}
    zoo = {}
    for name, entry in yaml.safe_load(text)["models"].items():
        unknown = sorted(set(entry) - known)
        if unknown:
            raise ValueError(
                f"zoo.yaml, {name}: unknown key {unknown[0]!r}; expected one of {', '.join(sorted(known))}"
            )
        tuples = {key: tuple(entry[key]) for key in ("dims", "pattern", "window") if key in entry}
        zoo[name] = ZooModel(name=name, **{**entry, **tuples})
    return zoo


def load_counts() -> dict[str, dict[str, int]]:
    """Name to `params` and `params_fused` (compact), and `macs`: multiply-adds of the fused form at 224x224."""
    return yaml.safe_load(resources.files("wbmm").joinpath("zoo_counts.yaml").read_text(encoding="utf-8"))


def weights_folder() -> Path:
    """Where weights that come with the project are: in a wheel inside of the package, in a checkout in models/."""
    inside = PACKAGE / "weights"
    return inside if inside.is_dir() else PACKAGE.parent / "models"
