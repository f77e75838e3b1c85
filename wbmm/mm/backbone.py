"""Backbones of dense prediction: WBMM, or a model of timm's with strides 4, 8, 16 and 32; a LayerNorm on each map."""

from collections.abc import Sequence
from pathlib import Path

import timm
import torch
import torch.nn as nn
from timm.layers import LayerNorm2d
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from wbmm.io.card import form_of
from wbmm.models import WBMM
from wbmm.models.fuse import FUSED_FORMS, fuse
from wbmm.models.state import CheckpointError
from wbmm.text import first_line, printable
from wbmm.zoo import load_zoo

from .pretrained import LEAST_MATCH, fetch, load_pretrained, match_report, read_weights

__all__ = [
    "TimmBackbone",
    "WBMMBackbone",
    "check_indices",
    "check_init",
    "load_timm_weights",
    "spread_biases",
    "timm_channels",
    "timm_depths",
]


class WBMMBackbone(WBMM):
    """WBMM without its classifier; gives a tuple of maps with strides 4, 8, 16 and 32, in NCHW memory.

    Args:
        arch: a model of the zoo, such as `wbmm_t_hier`. What is given beside it comes in place of its own.
        dims, pattern, depths, window_size, mixer: the architecture, where it is in no zoo; as in `WBMM`.
        padding_mode: how maps are padded to whole windows.
        large_kernel: `implicit_gemm` to run a depthwise mixer by the large-kernel CUDA package.
        ls_init_value: initial layer scale; None for none.
        in_chans: channels of the images.
        out_indices: stages whose maps are given, from 0 to 3. Later stages than the last of them are not built.
        drop_path_rate: stochastic depth of the last block.
        with_cp: activation checkpointing.
        frozen_stages: -1 for none, 0 for the stem, n for the stem and the first n stages.
        norm_eval: keep the statistics of all batch norms in training.
        sync_bn: batch norms with statistics over all processes. Without CUDA they stay ordinary ones.
        form: `training`, or `compact` or `dense` for the weights of a fused checkpoint.
        init_cfg: `dict(type="Pretrained", checkpoint=..., prefix=None, resize_tables=False)`, where the checkpoint is a
            file, a URL, or the name of a model with published weights.
    """

    def __init__(
        self,
        arch: str | None = None,
        dims: Sequence[int] | None = None,
        pattern: Sequence[str] | None = None,
        depths: Sequence[int] | None = None,
        window_size: int | str | Sequence | None = None,
        mixer: str | None = None,
        padding_mode: str = "zeros",
        large_kernel: str | None = None,
        ls_init_value: float | None = 1e-6,
        in_chans: int = 3,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        drop_path_rate: float = 0.0,
        with_cp: bool = False,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        sync_bn: bool = True,
        form: str = "training",
        init_cfg: dict | None = None,
    ) -> None:
        given = {"dims": dims, "pattern": pattern, "depths": depths, "window_size": window_size, "mixer": mixer}
        super().__init__(
            in_chans=in_chans,
            num_classes=0,
            padding_mode=padding_mode,
            large_kernel=large_kernel,
            ls_init_value=ls_init_value,
            drop_path_rate=drop_path_rate,
            **_architecture(arch, {key: value for key, value in given.items() if value is not None}),
        )
        self.out_indices = check_indices(out_indices)
        if not -1 <= frozen_stages <= len(self.stages):
            raise ValueError(f"frozen_stages {frozen_stages}: expected -1 (none), 0 (the stem) or 1 to 4 (stages)")
        if form not in ("training", *FUSED_FORMS):
            raise ValueError(f"form {form!r}: expected 'training', 'compact' or 'dense'")
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.init_cfg = check_init(init_cfg)

        # Parameters without a gradient would stop DistributedDataParallel: neither the head nor late stages remain.
        self.head = nn.Identity()
        self.stages = self.stages[: self.out_indices[-1] + 1]
        for i in self.out_indices:
            self.add_module(f"norm{i}", LayerNorm2d(self.feature_info[i]["num_chs"], eps=1e-6))
        if sync_bn and torch.cuda.is_available():
            self.stages = nn.SyncBatchNorm.convert_sync_batchnorm(self.stages)
        self.set_grad_checkpointing(with_cp)
        if form != "training":
            self.stages = fuse(self.stages.eval(), form)
        for module in self._frozen():
            module.requires_grad_(False)
        self.train()

    @property
    def depths(self) -> tuple[int, ...]:
        """Blocks of each stage, for layer decay."""
        return tuple(len(stage) for stage in self.patterns)

    @property
    def form(self) -> str:
        return form_of(self)

    def init_weights(self) -> None:
        """mmengine's hook before training: starts from the weights of `init_cfg`, and reports."""
        if self.init_cfg is None:
            spread_biases(self)
            return
        from mmengine.logging import print_log

        options = {key: value for key, value in self.init_cfg.items() if key != "type"}
        print_log(load_pretrained(self, **options), logger="current")

    def _frozen(self) -> list[nn.Module]:
        return [] if self.frozen_stages < 0 else [self.stem, *self.stages[: self.frozen_stages]]

    def train(self, mode: bool = True) -> "WBMMBackbone":
        """Train mode, but with the statistics of frozen stages (or of all, with `norm_eval`) kept."""
        super().train(mode)
        if mode:
            for module in self._frozen():
                module.eval()
            for module in self.modules():
                if self.norm_eval and isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.training and self.form != "training":
            raise ValueError(
                f"the backbone is fused ({self.form} form) and cannot be trained: build it with form='training' from "
                "the training checkpoint, or call eval() for inference"
            )
        maps = self.forward_intermediates(x, indices=list(self.out_indices), intermediates_only=True)
        # mmcv's operators, RoIAlign among them, take any memory for NCHW: channels-last maps would be misread silently.
        return tuple(
            getattr(self, f"norm{i}")(part).contiguous() for i, part in zip(self.out_indices, maps, strict=True)
        )


def _architecture(arch: str | None, given: dict) -> dict:
    """Arguments of `WBMM`: a zoo model's, with what is given in their place."""
    zoo = load_zoo()
    if arch is None:
        missing = [key for key in ("dims", "pattern") if key not in given]
        if missing:
            raise ValueError(f"the backbone needs arch (such as 'wbmm_t_hier'), or dims and pattern: no {missing[0]}")
        return given
    if arch not in zoo:
        raise ValueError(f"arch {arch!r} is not in the zoo; expected one of {', '.join(zoo)}")
    model = zoo[arch]
    own = {"dims": model.dims, "pattern": model.pattern, "window_size": model.window, "mixer": model.mixer}
    return {**own, **given}


def spread_biases(backbone: nn.Module) -> None:
    """Small random biases for the convolutions of a stem and between stages, before a training from scratch.

    Batches are padded with zeros. Where all biases are zero too, a LayerNorm gets zeros in every channel and multiplies
    gradients by 1 / sqrt(eps) = 1000; through several of them the norm of the gradient was 2e9.
    """
    for name, module in backbone.named_modules():
        if isinstance(module, nn.Conv2d) and module.bias is not None and ("stem" in name or "downsample" in name):
            nn.init.trunc_normal_(module.bias, std=0.02)


def check_indices(indices: Sequence[int]) -> tuple[int, ...]:
    indices = tuple(indices)
    if not indices or list(indices) != sorted(set(indices)) or indices[0] < 0 or indices[-1] > 3:
        raise ValueError(f"out_indices {indices!r}: expected increasing numbers from 0 to 3, such as (0, 1, 2, 3)")
    return indices


def check_init(init_cfg: dict | None) -> dict | None:
    if not init_cfg:
        return None
    if init_cfg.get("type") != "Pretrained" or not init_cfg.get("checkpoint"):
        raise ValueError(
            f"init_cfg {dict(init_cfg)!r}: expected dict(type='Pretrained', checkpoint=FILE, URL or published model)"
        )
    unknown = sorted(set(init_cfg) - {"type", "checkpoint", "prefix", "resize_tables"})
    if unknown:
        raise ValueError(f"init_cfg: unknown key {unknown[0]!r}; expected checkpoint, prefix or resize_tables")
    return dict(init_cfg)


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
            spread_biases(self.body)
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


def timm_channels(arch: str) -> list[int]:
    """Channels of the four maps of a model of timm's."""
    return list(_create_features(arch, tuple(range(len(STRIDES))), {}).feature_info.channels())


def timm_depths(arch: str) -> tuple[int, ...] | None:
    """`TimmBackbone.depths` of a model of timm's; a `ValueError` for a model that cannot be a backbone."""
    with torch.device("meta"):
        return TimmBackbone(arch).depths


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
