"""The backbone of dense prediction: the WBMM class itself, with a LayerNorm on each map that it gives."""

from collections.abc import Sequence

import torch
import torch.nn as nn
from timm.layers import LayerNorm2d
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from wbmm.io.card import form_of
from wbmm.models import WBMM
from wbmm.models.fuse import FUSED_FORMS, fuse
from wbmm.zoo import load_zoo

from .pretrained import load_pretrained

__all__ = ["WBMMBackbone", "check_indices", "check_init"]


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
