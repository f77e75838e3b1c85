"""Which layers can be quantised, and which stay in float: found by measuring what each group costs."""

import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from torch import Tensor

from wbmm.deploy.evaluate import USELESS, Quality, quality
from wbmm.deploy.runtime import open_runner
from wbmm.progress import Advance
from wbmm.text import first_line

__all__ = [
    "FOLLOWS",
    "GROUPS",
    "RESHAPES",
    "Layer",
    "LayerChoice",
    "choose_layers",
    "group_of_product",
    "mark_head",
    "match_layers",
    "sensitivity",
    "try_layers",
    "write_converted",
]

GROUPS = {
    "convolution": "dense convolutions: stem, downsampling",
    "depthwise": "depthwise convolutions",
    "window": "windowed products, or their convolutions",
    "gate": "linears of squeeze and excitation",
    "expand": "first linear of each feed-forward part",
    "reduce": "second linear of each feed-forward part, after GRN",
    "head": "the classifier",
}
# The group of a linear, by what takes its result, and what may stand between the two.
FOLLOWS = {"Gelu": "expand", "Relu": "gate", "Sigmoid": "gate"}
RESHAPES = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Convert", "Identity"}


@dataclass(frozen=True)
class Layer:
    """A node of a graph: its name, and one of `GROUPS`."""

    name: str
    group: str


def group_of_product(weight: Sequence[int] | None, follows: str | None) -> str | None:
    """The group of a matrix product, the classifier taken for a second linear: see `mark_head`.

    Args:
        weight: shape of the right factor if that is a constant. Other products have no group and stay in float: those
            of two activations, and a constant from the left, which is a sum (GRN's).
        follows: type of the operation that takes the result, a bias and changes of shape left out.
    """
    if weight is None:
        return None
    if len(weight) > 2 and weight[0] > 1:
        return "window"
    return FOLLOWS.get(follows, "reduce")


def mark_head(layers: list[Layer]) -> list[Layer]:
    """The same layers, the last of them being the classifier."""
    if layers and layers[-1].group == "reduce":
        layers[-1] = Layer(layers[-1].name, "head")
    return layers


def match_layers(layers: Sequence[Layer], patterns: Iterable[str]) -> set[str]:
    """The names of the layers that a pattern names, by group or by name (`*` and `?` stand for anything)."""
    kept: set[str] = set()
    for pattern in patterns:
        found = {layer.name for layer in layers if layer.group == pattern or fnmatchcase(layer.name, pattern)}
        if not found:
            there = dict.fromkeys(layer.group for layer in layers)
            raise ValueError(
                f"--keep {pattern}: no layer has this name or group. The groups of this model are {', '.join(there)}; "
                f"a layer is called, for instance, {layers[0].name!r}"
            )
        kept |= found
    return kept


Try = Callable[[set[str]], Quality]  # from the layers to keep in float


@dataclass
class LayerChoice:
    """What was decided, and on what grounds.

    Attributes:
        keep: names of the layers that stay in float.
        groups: those of them that were kept as a whole, in the order in which they were found.
        before: with nothing kept but what the user asked for.
        after: with `keep`.
        alone: each group quantised by itself; empty if there was no need to look.
    """

    keep: set[str]
    groups: list[str]
    before: Quality
    after: Quality
    alone: dict[str, Quality]


def write_converted(
    backend, precision: str, path: Path, calibration: Tensor | None = None, keep: set[str] = frozenset()
) -> None:
    """Lets a runtime's tool convert a model; whatever it raises is one kind of error, but for those of writing."""
    try:
        if precision == "int8":
            backend.quantize(calibration, keep, path)
        else:
            backend.convert(precision, path)
    except (OSError, ValueError):
        raise
    except Exception as error:
        raise ValueError(
            f"{backend.runtime}'s tools cannot convert this model to {precision}: {first_line(error)}"
        ) from error


def try_layers(backend, calibration: Tensor, images: Tensor, reference: Tensor, advance: Advance) -> Try:
    """A function from the layers to keep to the quality of the rest quantised, on `images`; each call advances."""

    def attempt(keep: set[str]) -> Quality:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"trial{backend.suffix}"
            write_converted(backend, "int8", path, calibration, keep)
            try:
                return quality(open_runner(path)(images), reference)
            except ValueError:  # a runtime may load a file and have no kernel for a layer of it
                return USELESS
            finally:
                advance(1)

    return attempt


def sensitivity(layers: Sequence[Layer], attempt: Try, keep: set[str] = frozenset()) -> dict[str, Quality]:
    """The quality with each group quantised by itself, the worst first; layers in `keep` never are."""
    found = {}
    for group in dict.fromkeys(layer.group for layer in layers):
        others = {layer.name for layer in layers if layer.group != group}
        if any(layer.name not in keep for layer in layers if layer.group == group):
            found[group] = attempt(others | keep)
    return dict(sorted(found.items(), key=lambda item: -item[1].noise))


def choose_layers(
    layers: Sequence[Layer], attempt: Try, target: float, keep: set[str], look: bool = False
) -> LayerChoice:
    """Quantises everything; while the agreement is below `target`, keeps the group that costs most, and tries again.

    A group whose keeping does not raise the agreement or lower the noise is quantised all the same.

    Args:
        layers: that can be quantised.
        attempt: see `try_layers`.
        target: agreement in per cent to reach.
        keep: names that stay in float in any case.
        look: measure each group by itself even if the target is reached at once.
    """
    before = after = attempt(keep)
    if before.agreement < target:
        print(
            f"all in INT8, {before.agreement:.2f} % of the images keep their first class, less than {target:g} %: "
            "looking for the layers that hurt",
            file=sys.stderr,
        )
    alone = sensitivity(layers, attempt, keep) if look or before.agreement < target else {}
    groups: list[str] = []
    for group in alone:
        if after.agreement >= target:
            break
        wider = keep | {layer.name for layer in layers if layer.group == group}
        if wider >= {layer.name for layer in layers}:
            continue
        now = attempt(wider)
        if (now.agreement, -now.noise) > (after.agreement, -after.noise):
            keep, after = wider, now
            groups.append(group)
    return LayerChoice(keep, groups, before, after, alone)
