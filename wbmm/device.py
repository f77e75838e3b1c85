"""Where things run."""

import torch

__all__ = ["check_device"]


def check_device(device: str) -> None:
    """Raises unless tensors can be made there."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from None
