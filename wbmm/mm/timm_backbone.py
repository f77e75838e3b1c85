"""Any model of timm's with maps of strides 4, 8, 16 and 32 as a backbone: ConvNeXt, and ConvNeXt with WBMM."""

from collections.abc import Sequence
from pathlib import Path

import timm
import torch.nn as nn
from timm.layers import LayerNorm2d
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

import wbmm.models  # noqa: F401  (registers convnext_tiny_wbmm)
from wbmm.models.state import CheckpointError
from wbmm.text import first_line, printable
from wbmm.zoo import load_zoo

from .backbone import check_indices, check_init
from .pretrained import LEAST_MATCH, fetch, match_report, read_weights

__all__ = ["TimmBackbone", "load_timm_weights"]

STRIDES = (4, 8, 16, 32)


class TimmBackbone(nn.Module):
    """timm's features of a model, each with a LayerNorm: a tuple of maps, as ConvNeXt's segmentors have them.

    Args:
        arch: a name that timm knows, such as `convnext_tiny` or `convnext_tiny_wbmm`.
        drop_path_rate: stochastic depth of the last block.
        in_chans: channels of the images.
        out_indices: stages whose maps are given, from 0 to 3. Later stages than the last of them are left out.
        with_cp: activation checkpointing, block by block.
        frozen_stages: -1 for none, 0 for the stem, n for the stem and the first n stages.
        norm_eval: keep the statistics of all batch norms in training.
        model_args: more arguments of `timm.create_model`.
        init_cfg: `dict(type="Pretrained", checkpoint=..., prefix=None)`, where the checkpoint is a file, a URL, or the
            name of a model with weights of timm's, such as `convnext_tiny.fb_in1k`.
    """

    def __init__(
        self,
        arch: str,
        drop_path_rate: float = 0.0,
        in_chans: int = 3,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        with_cp: bool = False,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        model_args: dict | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__()
        self.arch = arch
        self.in_chans = in_chans
        self.out_indices = check_indices(out_indices)
        self.norm_eval = norm_eval
        self.init_cfg = check_init(init_cfg)
        if "resize_tables" in (self.init_cfg or {}):
            raise ValueError("init_cfg: resize_tables is for WBMMBackbone; expected checkpoint and prefix")
        args = {"drop_path_rate": drop_path_rate, "in_chans": in_chans, **(model_args or {})}
        self.body = _create_features(arch, self.out_indices, args)
        self.frozen = _up_to(self.body, frozen_stages, self.out_indices[-1] + 1)
        channels = self.body.feature_info.channels()
        for i, dim in zip(self.out_indices, channels, strict=True):
            self.add_module(f"norm{i}", LayerNorm2d(dim, eps=1e-6))
        if with_cp:
            _recompute_blocks(self.body, arch)
        for name in self.frozen:
            self.body.get_submodule(name).requires_grad_(False)
        self.train()

    @property
    def depths(self) -> tuple[int, ...] | None:
        """Blocks of each stage, for layer decay: 0 of one that is left out, None for a model without such stages."""
        children = dict(self.body.named_children())
        stages = [getattr(children.get(f"stages_{i}"), "blocks", None) for i in range(len(STRIDES))]
        if stages[0] is None:
            return None
        return tuple(0 if blocks is None else len(blocks) for blocks in stages)

    def init_weights(self) -> None:
        """mmengine's hook before training: starts from the weights of `init_cfg`, and reports."""
        if self.init_cfg is None:
            return
        from mmengine.logging import print_log

        options = {key: value for key, value in self.init_cfg.items() if key != "type"}
        print_log(load_timm_weights(self, **options), logger="current")

    def train(self, mode: bool = True) -> "TimmBackbone":
        """Train mode, but with frozen stages (and with `norm_eval` all batch norms) in eval mode."""
        super().train(mode)
        if mode:
            for name in self.frozen:
                self.body.get_submodule(name).eval()
            for module in self.modules():
                if self.norm_eval and isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        maps = self.body(x)
        if getattr(self.body, "output_fmt", "NCHW") == "NHWC":
            maps = [part.permute(0, 3, 1, 2) for part in maps]
        # NCHW memory, as in WBMMBackbone: mmcv's operators would misread another one silently.
        return tuple(
            getattr(self, f"norm{i}")(part).contiguous() for i, part in zip(self.out_indices, maps, strict=True)
        )


def _create_features(arch: str, out_indices: tuple[int, ...], args: dict) -> nn.Module:
    """timm's feature extractor for the last four maps of a model, or those of them that are asked for."""
    if not timm.is_model(arch):
        raise ValueError(f"arch {arch!r}: timm knows no such model; see timm.list_models(), such as 'convnext_tiny'")
    try:
        body = timm.create_model(arch, features_only=True, out_indices=[i - len(STRIDES) for i in out_indices], **args)
    except (AssertionError, IndexError, RuntimeError) as error:
        raise ValueError(f"arch {arch!r} cannot give the maps of four stages ({error})") from None
    strides, expected = tuple(body.feature_info.reduction()), tuple(STRIDES[i] for i in out_indices)
    if strides != expected:
        raise ValueError(f"arch {arch!r} gives maps of strides {strides}; a backbone's are {expected}")
    return body


def _up_to(body: nn.Module, frozen_stages: int, built: int) -> list[str]:
    """The parts of a feature extractor from its first layer to a stage's last one."""
    if not isinstance(frozen_stages, int) or not -1 <= frozen_stages <= built:
        raise ValueError(f"frozen_stages {frozen_stages!r}: expected -1 (none), 0 (the stem) or 1 to {built} (stages)")
    if frozen_stages < 0:
        return []
    names = [name for name, _ in body.named_children()]
    stage = body.feature_info[max(frozen_stages, 1) - 1 - len(STRIDES)]["module"].replace(".", "_")
    if stage not in names:
        raise ValueError(f"frozen_stages {frozen_stages}: this model's parts are {', '.join(names)}, with no {stage}")
    return names[: names.index(stage) + (frozen_stages > 0)]


def _recompute_blocks(body: nn.Module, arch: str) -> None:
    """timm's checkpointing inside stages; that of its feature extractors keeps a whole stage's activations."""
    stages = [module for module in body.modules() if module is not body and hasattr(module, "grad_checkpointing")]
    if not stages:
        raise ValueError(f"with_cp: no stage of {arch} has activation checkpointing in timm")
    for stage in stages:
        stage.grad_checkpointing = True


def load_timm_weights(backbone: TimmBackbone, checkpoint: str, prefix: str | None = None) -> str:
    """Loads weights into a backbone and says what matched; too little is a `CheckpointError`.

    Args:
        backbone: its output norms may be missing in the file.
        checkpoint: a file or a URL, read without running what is in it, or a model with weights of timm's; a
            classifier's or a segmentor's.
        prefix: what stands before the backbone's names; found by itself for `backbone.`.
    """
    state_dict = _weights_of_timm(checkpoint, backbone.in_chans)
    if state_dict is None:
        checkpoint = str(fetch(checkpoint))
        state_dict = read_weights(Path(checkpoint), prefix)
    state_dict = _to_features(state_dict, backbone.body)
    own = {key: value for key, value in backbone.state_dict().items() if not key.endswith("num_batches_tracked")}
    needed = [key for key in own if key.startswith("body.")]
    present = [key for key in own if key in state_dict]
    matched = [key for key in present if state_dict[key].shape == own[key].shape]
    if len(set(matched) & set(needed)) < LEAST_MATCH * len(needed) or len(matched) < len(present):
        odd = next((key for key in own if key not in matched), None)
        raise CheckpointError(
            f"{checkpoint}: {len(matched)} of the {len(own)} tensors of {backbone.arch} match; {LEAST_MATCH:.0%} must, "
            f"and none may be of another shape. The first that does not is {odd}; in the file are "
            f"{', '.join(map(printable, list(state_dict)[:3]))}, ..."
        )
    backbone.load_state_dict({key: state_dict[key] for key in matched}, strict=False)
    return match_report(Path(checkpoint), matched, own, state_dict)


def _weights_of_timm(name: str, in_chans: int) -> dict[str, Tensor] | None:
    """The state dict of a pretrained classifier; None for a file, a URL and a model of ours."""
    arch = name.partition(".")[0]
    if Path(name).expanduser().is_file() or not timm.is_model(arch) or arch in load_zoo():
        return None
    known = timm.list_pretrained(f"{arch}.*")
    if not known or (name != arch and name not in known):
        has = f"those of {arch} are {', '.join(known)}" if known else f"timm has none for {arch}"
        raise CheckpointError(f"{name}: there are no such weights ({has}). Train them, or name a file")
    try:
        return timm.create_model(name, pretrained=True, in_chans=in_chans).state_dict()
    except Exception as error:  # whatever the network and its libraries raise
        raise CheckpointError(
            f"{name}: could not be downloaded ({first_line(error)}); give a local file instead"
        ) from None


def _to_features(state_dict: dict[str, Tensor], body: nn.Module) -> dict[str, Tensor]:
    """A classifier's names (`stages.2.blocks.`) as the backbone's (`body.stages_2.blocks.`); others stay."""
    parts = {name for name, _ in body.named_children()}
    renamed = {}
    for key, value in state_dict.items():
        first, _, rest = key.partition(".")
        second, _, tail = rest.partition(".")
        if f"{first}_{second}" in parts:
            key = f"body.{first}_{second}.{tail}"
        elif first in parts:
            key = f"body.{key}"
        renamed[key] = value
    return renamed
