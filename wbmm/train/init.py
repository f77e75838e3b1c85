"""Starting weights for fine-tuning: from a run or a released file, perhaps with another number of classes."""

from pathlib import Path

import torch.nn as nn

from wbmm.checkpoint import load_weights, read_state_dict

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
    own = model.state_dict()
    fresh = [
        key
        for key in _classifier_keys(model)
        if key in own and (key not in state_dict or state_dict[key].shape != own[key].shape)
    ]
    state_dict.update({key: own[key] for key in fresh})
    load_weights(model, state_dict, resize_tables=resize_tables)
    head = f"; the classifier is new ({', '.join(fresh)})" if fresh else ""
    return f"started from the weights in {path}{head}"


def _classifier_keys(model: nn.Module) -> list[str]:
    classifier = model.get_classifier()
    names = [name for name, module in model.named_modules() if module is classifier]
    return [f"{name}.{part}" for name in names for part in ("weight", "bias")]
