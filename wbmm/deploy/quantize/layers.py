"""Which layers of a graph can be quantised, by what they do in the model; told from the graph's structure alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

__all__ = ["FOLLOWS", "GROUPS", "RESHAPES", "Layer", "group_of_product", "mark_head", "match_layers"]

GROUPS = {
    "convolution": "dense convolutions: stem, downsampling",
    "depthwise": "depthwise convolutions",
    "window": "windowed products, or their convolutions",
    "gate": "linears of squeeze and excitation",
    "expand": "first linear of each feed-forward part",
    "reduce": "second linear of each feed-forward part, after GRN",
    "head": "the classifier",
}


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
