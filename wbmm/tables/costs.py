"""Parameters and multiply-adds of a row, counted without memory."""

from dataclasses import dataclass

import timm

from wbmm.deploy.fuse import fuse
from wbmm.models.profile import build_on_meta, count_macs, count_params

__all__ = ["Costs", "check_model", "count_costs"]


@dataclass(frozen=True)
class Costs:
    """Counts of one net in its training form and fused."""

    params: int
    params_fused: int
    macs: int
    macs_fused: int


def check_model(name: str) -> None:
    if not timm.is_model(name):
        raise ValueError(f"timm knows no model {name!r}; see `wbmm list` and timm.list_models()")


def count_costs(model: str, args: dict, size: int = 224, in_chans: int = 3) -> Costs:
    """Counts at a given size. Without the large-kernel package, which changes neither."""
    check_model(model)
    args = {key: value for key, value in args.items() if key != "large_kernel"}
    net = build_on_meta(model, **args, in_chans=in_chans)
    fused = fuse(net)
    return Costs(
        params=count_params(net),
        params_fused=count_params(fused),
        macs=count_macs(net, (size, size), in_chans)[""],
        macs_fused=count_macs(fused, (size, size), in_chans)[""],
    )
