"""Layer-wise learning rates for a segmentor or a detector on a backbone of ours."""

import torch.nn as nn
from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor

from wbmm.models.layer_groups import layer_group, layer_scale, num_groups

__all__ = ["LayerDecayConstructor"]

_BACKBONE = "backbone."
_BODY = "body."  # the model inside a TimmBackbone


class LayerDecayConstructor(DefaultOptimWrapperConstructor):
    """Parameter groups by layer, each with its learning rate, and without weight decay on 1-d parameters and biases.

    In a configuration:

        optim_wrapper = dict(constructor="WBMMLayerDecay", paramwise_cfg=dict(decay_rate=0.9, groups=12), ...)

    The groups are those of `wbmm.models.layer_groups`; whatever is not a layer of the backbone, its output norms
    included, counts as a head and learns at the full rate. `groups` is the number of the last one, by default what
    follows from the depths.
    """

    def _validate_cfg(self) -> None:
        unknown = sorted(set(self.paramwise_cfg) - {"decay_rate", "groups"})
        if unknown or "decay_rate" not in self.paramwise_cfg:
            raise ValueError(f"paramwise_cfg {dict(self.paramwise_cfg)!r}: expected decay_rate and, optionally, groups")
        if self.base_lr is None or self.base_wd is None:
            raise ValueError("layer decay needs the optimiser's lr and weight_decay")

    def add_params(self, params: list[dict], module: nn.Module, prefix: str = "", is_dcn_module=None) -> None:
        """Appends the groups of a whole model to `params`."""
        depths = getattr(getattr(module, "backbone", None), "depths", None)
        if depths is None:
            raise ValueError(
                "layer decay needs a model with a backbone of ours, in stages of blocks; "
                f"{type(module).__name__} has none"
            )
        rate, last = self.paramwise_cfg["decay_rate"], self.paramwise_cfg.get("groups") or num_groups(depths)
        groups: dict[tuple[int, bool], dict] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            inner = name.removeprefix(_BACKBONE).removeprefix(_BODY) if name.startswith(_BACKBONE) else "head"
            layer, decay = layer_group(inner, depths, last), parameter.ndim > 1 and not name.endswith(".bias")
            scale = layer_scale(inner, depths, rate, last)
            group = groups.setdefault(
                (layer, decay),
                {
                    "params": [],
                    "lr": self.base_lr * scale,
                    "weight_decay": self.base_wd if decay else 0.0,
                    "layer": layer,
                    "lr_scale": scale,
                },
            )
            group["params"].append(parameter)
        ordered = [groups[key] for key in sorted(groups)]
        params.extend(ordered)
        print_log("\n".join(["layer decay:", *map(_describe, ordered)]), logger="current")


def _describe(group: dict) -> str:
    return (
        f"  group {group['layer']:2d}: {len(group['params']):3d} tensors, "
        f"lr x {group['lr_scale']:.4f}, weight decay {group['weight_decay']:g}"
    )
