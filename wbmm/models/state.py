"""Where the state dict stands inside what a file holds."""

from torch import Tensor

# The first one present wins.
_WRAPPERS = ("state_dict_ema", "model_ema", "ema", "state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not fit the model."""


def find_state_dict(contents: object, ema: bool = True) -> dict[str, Tensor]:
    """The state dict inside a file's contents: itself, or under `state_dict`, `model`, or an EMA of it.

    Args:
        contents: what a file holds.
        ema: prefer an exponential moving average where there is one.
    """
    if isinstance(contents, dict):
        for key in _WRAPPERS:
            inner = contents.get(key)
            if isinstance(inner, dict) and inner and (ema or "ema" not in key):
                return find_state_dict(inner, ema)
        if contents and all(isinstance(value, Tensor) for value in contents.values()):
            return {_strip(key): value for key, value in contents.items()}
    held = f"keys {', '.join(map(str, list(contents)[:5]))}" if isinstance(contents, dict) else type(contents).__name__
    raise CheckpointError(
        f"no state dict found: expected one, or one under {', '.join(_WRAPPERS)}; the file holds {held}"
    )


def _strip(key: str) -> str:
    for prefix in _PREFIXES:
        key = key.removeprefix(prefix)
    return key
