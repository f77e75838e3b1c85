"""Starting weights for fine-tuning: from a run or a released file, perhaps with another number of classes."""

from pathlib import Path

import torch.nn as nn
from torch import Tensor

from wbmm.checkpoint import CheckpointError, identify, load_weights, read_state_dict, safe_load
from wbmm.deploy.describe import read_card

__all__ = ["init_weights"]


def init_weights(model: nn.Module, path: Path, resize_tables: bool = False) -> str:
    """Loads `path` into `model` and says what was done.

    A classifier of another number of classes stays as initialised; anything else that does not fit is an error.

    Args:
        model: The model to start.
        path: A run's checkpoint (its moving average, if it has one), or a file of weights.
        resize_tables: Interpolate tables of other window sizes.
    """
    state_dict = dict(read_state_dict(path))
    seen = identify(state_dict)
    if seen is not None and seen.form != "training":
        raise CheckpointError(
            f"{path} is fused ({seen.form} form), which cannot be trained: batch norms and branches are folded into "
            f"its weights. Fine-tuning needs the training checkpoint that it was made from{_source(path)}"
        )
    own = model.state_dict()
    fresh = [
        key
        for key in _classifier_keys(model)
        if key in own and (key not in state_dict or _has_other_classes(state_dict[key], own[key]))
    ]
    state_dict.update({key: own[key] for key in fresh})
    try:
        load_weights(model, state_dict, resize_tables=resize_tables)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    head = f"; the classifier is new ({', '.join(fresh)})" if fresh else ""
    return f"started from the weights in {path}{head}"


def _has_other_classes(value: Tensor, own: Tensor) -> bool:
    return value.ndim == own.ndim and value.shape[1:] == own.shape[1:] and len(value) != len(own)


def _source(path: Path) -> str:
    card = read_card(Path(path), safe_load(path))
    return f": {card.source['file']}" if card and card.source else ""


def _classifier_keys(model: nn.Module) -> list[str]:
    classifier = model.get_classifier()
    names = [name for name, module in model.named_modules() if module is classifier]
    return [f"{name}.{part}" for name in names for part in ("weight", "bias")]
