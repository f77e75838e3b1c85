"""WBMM: windowed batch matrix multiplication for large receptive fields.

Paper: `WBMM: Windowed Batch Matrix Multiplication for Efficient Large Receptive Field Convolution` (ICML 2026).

A four-stage convolutional net whose spatial operator is, in W blocks, a batched matrix product inside windows and, in
D blocks, a 3x3 depthwise convolution that carries information across them. Tensors are logically NCHW and physically
channels-last throughout. The baselines, UniRepLKNet among them, are the same net with another operator in W blocks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import LayerNorm2d, NormMlpClassifierHead, calculate_drop_path_rates, get_device_dtype, trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._builder import resolve_pretrained_cfg
from timm.models._features import feature_take_indices
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from wbmm.layers import Block, PackedConv2d
from wbmm.ops.windows import to_channels_last
from wbmm.zoo import ZooModel, load_zoo, weights_folder

from .hub import fetch_weights
from .named_mixers import MixerArgs, block_options, create_mixer, parse_pattern, parse_windows, resolve_mixer
from .state import CheckpointError, convert_released, explain_mismatch, find_state_dict

__all__ = ["WBMM"]


class Stem(nn.Module):
    """Two strided convolutions to a quarter of the resolution; the map is channels-last from here on."""

    def __init__(self, in_chans: int, dim: int, device=None, dtype=None) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.conv1 = PackedConv2d(in_chans, dim // 2, 3, stride=2, padding=1, **dd)
        self.norm1 = LayerNorm2d(dim // 2, eps=1e-6, **dd)
        self.conv2 = PackedConv2d(dim // 2, dim, 3, stride=2, padding=1, **dd)
        self.norm2 = LayerNorm2d(dim, eps=1e-6, **dd)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(to_channels_last(x))
        return self.norm2(self.conv2(F.gelu(self.norm1(x))))


class Downsample(nn.Module):
    """A strided convolution to half the resolution."""

    def __init__(self, in_chs: int, out_chs: int, device=None, dtype=None) -> None:
        super().__init__()
        self.conv = PackedConv2d(in_chs, out_chs, 3, stride=2, padding=1, device=device, dtype=dtype)
        self.norm = LayerNorm2d(out_chs, eps=1e-6, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


def run_checkpointed(blocks: nn.Sequential, x: Tensor) -> Tensor:
    """Activation checkpointing: only the input of each block is kept; the backward pass computes the rest again."""
    for block in blocks:
        # A compiled graph has no place for the context; there the caller sees to the statistics.
        contexts = {} if torch.compiler.is_compiling() else {"context_fn": partial(_contexts, block)}
        x = checkpoint(block, x, use_reentrant=False, **contexts)
    return x


def _contexts(block: nn.Module):
    """For the first run and for the second one."""
    return nullcontext(), _keep_buffers(block)


@contextmanager
def _keep_buffers(block: nn.Module) -> Iterator[None]:
    """Leaves a block's buffers as they were: batch norms must not count a batch twice."""
    before = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


class Stage(nn.Module):
    """A downsampling layer (none in the first stage) and the blocks of one resolution."""

    def __init__(
        self,
        in_chs: int,
        dim: int,
        pattern: str,
        mixer_args: dict,
        ls_init_value: float | None,
        drop_path: Sequence[float],
        downsample: bool,
        device=None,
        dtype=None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.grad_checkpointing = False
        self.downsample = Downsample(in_chs, dim, **dd) if downsample else nn.Identity()
        self.blocks = nn.Sequential(
            *(
                Block(
                    create_mixer(MixerArgs(letter, dim, **mixer_args, factory=dd)),
                    dim,
                    ls_init_value=ls_init_value,
                    drop_path=rate,
                    **block_options(letter, mixer_args["mixer"]),
                    **dd,
                )
                for letter, rate in zip(pattern, drop_path, strict=True)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        if self.grad_checkpointing and self.training and not torch.jit.is_scripting():
            return run_checkpointed(self.blocks, x)
        else:  # noqa: RET505  a script compiles this branch alone
            return self.blocks(x)


class WBMM(nn.Module):
    """The WBMM family.

    Args:
        in_chans: input channels.
        num_classes: classes; 0 for no classifier.
        global_pool: pooling before the head.
        depths: blocks of each stage; checked against `pattern`, and taken from it when not given.
        dims: channels of each stage.
        pattern: blocks of each stage, a letter a block: `("DDD", "WDW", "(WD)x9", "WWW")`. W is WBMM, D a 3x3 depthwise
            convolution, M is WBMM with depthwise kernels beside it in training.
        window_size: one window, or one a stage: 7, (7, 14), or "14+7" for a hierarchical one.
        mixer: what stands in W blocks: `wbmm`, or one of the operators that the paper compares it with (in M blocks
            too), such as `dw5`, `dw13_reparam`, `slak` or `win_attn`; `wbmm.models.named_mixers` has them all.
        padding_mode: how maps are padded to whole windows: `zeros`, `reflect`, `replicate`.
        large_kernel: `implicit_gemm` to run a depthwise mixer by the large-kernel CUDA package.
        ls_init_value: initial layer scale; None for none.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block; it grows linearly with depth.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        depths: Sequence[int] | None = None,
        dims: Sequence[int] = (80, 160, 320, 640),
        pattern: Sequence[str | Sequence[str]] = ("DDD", "WDW", "(WD)x9", "WWW"),
        window_size: int | str | Sequence = 7,
        mixer: str = "wbmm",
        padding_mode: str = "zeros",
        large_kernel: str | None = None,
        ls_init_value: float | None = 1e-6,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        patterns = parse_pattern(pattern, depths)
        mixer, patterns, windows = resolve_mixer(mixer, patterns, parse_windows(window_size))
        if len(dims) != len(patterns) or any(dim % 8 for dim in dims):
            raise ValueError(
                f"dims {tuple(dims)!r}: expected {len(patterns)} multiples of 8, such as (40, 80, 160, 320)"
            )
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.drop_rate = drop_rate
        self.patterns = patterns
        self.windows = windows
        self.mixer = mixer
        mixer_args = {"mixer": mixer, "padding_mode": padding_mode, "large_kernel": large_kernel}

        self.stem = Stem(in_chans, dims[0], **dd)
        rates = calculate_drop_path_rates(drop_path_rate, [len(stage) for stage in patterns], stagewise=True)
        self.stages = nn.Sequential(
            *(
                Stage(
                    dims[max(i - 1, 0)],
                    dim,
                    patterns[i],
                    {"stage": i, "window": windows[i], **mixer_args},
                    ls_init_value,
                    rates[i],
                    downsample=i > 0,
                    **dd,
                )
                for i, dim in enumerate(dims)
            )
        )
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(dims)
        ]
        self.num_features = self.head_hidden_size = dims[-1]
        self.head = NormMlpClassifierHead(
            dims[-1],
            num_classes,
            pool_type=global_pool,
            drop_rate=drop_rate,
            norm_layer=partial(LayerNorm2d, eps=1e-6),
            **dd,
        )
        self.apply(_init_weights)
        self.register_load_state_dict_pre_hook(_load_released)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        return {
            "stem": r"^stem",
            "blocks": r"^stages\.(\d+)"
            if coarse
            else [(r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)],
        }

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Nothing beyond the usual rule (1-d parameters and biases): tables and GRN are decayed, as released."""
        return set()

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool, **get_device_dtype(self))
        if isinstance(self.head.fc, nn.Linear):
            _init_weights(self.head.fc)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The maps of several stages beside the last one.

        Args:
            x: images.
            indices: the last n stages, all with None, or those of a sequence.
            norm: accepted for timm's contract; the family has no norm on its maps.
            stop_early: do not compute stages after the last one asked for.
            output_fmt: only `NCHW`.
            intermediates_only: leave out the final map.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt {output_fmt!r}: only 'NCHW' is available")
        take, last = feature_take_indices(len(self.stages), indices)
        maps = []
        x = self.stem(x)
        for i, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x = stage(x)
            if i in take:
                maps.append(x)
        return maps if intermediates_only else (x, maps)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last one asked for, and the head."""
        take, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def forward_features(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(x, pre_logits=pre_logits) if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True, assign: bool = False):
        """As PyTorch's; released names are accepted, and an error says what the checkpoint looks like."""
        try:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        except RuntimeError as error:
            lines = str(error).splitlines()
            if len(lines) > 8:
                lines[8:] = [f"\t... and {len(lines) - 8} more"]
            raise RuntimeError("\n".join([*lines, explain_mismatch(self, convert_released(state_dict))])) from None


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.Linear)) and not module.weight.is_meta:  # where it is slow, and has no effect
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _load_released(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args) -> None:
    """Pre-hook of `load_state_dict`: released names become ours, in place, inside any container."""
    converted = convert_released(state_dict, prefix)
    if converted is not state_dict:
        state_dict.clear()
        state_dict.update(converted)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """timm's hook on what a pretrained file holds: it is unwrapped, and released names become ours."""
    return convert_released(find_state_dict(state_dict))


def _create_wbmm(variant: str, pretrained: bool = False, **kwargs) -> WBMM:
    if pretrained:
        _fetch_first(variant, kwargs)
    return build_model_with_cfg(
        WBMM,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": (0, 1, 2, 3), "flatten_sequential": True},
        **kwargs,
    )


def _fetch_first(variant: str, kwargs: dict) -> None:
    """Brings published weights into the hub's cache, where timm then finds them; one line if that fails."""
    cfg = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay"))
    if cfg.file and not Path(cfg.file).exists():  # a folder, where timm reads `local-dir:`
        raise CheckpointError(f"{variant}: its weights should be in {cfg.file}, and there is no such file")
    if cfg.hf_hub_id and cfg.hf_hub_filename and not (cfg.file or cfg.state_dict or cfg.url):
        fetch_weights(variant, cfg.hf_hub_id, cfg.hf_hub_filename)


def _cfg(**kwargs) -> dict:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stem.conv1",
        "classifier": "head.fc",
        "license": "apache-2.0",
        **kwargs,
    }


def _zoo_cfgs(model: ZooModel) -> dict[str, dict]:
    """timm's configurations, a tag each. What comes with the project is small, so it is never the default: without a
    tag a model has ImageNet's 1000 classes and 224 px."""
    hub, local = {}, {}
    for tag, source in model.weights.items():
        if "local" in source:
            local[f"{model.name}.{tag}"] = _local_cfg(**source)
        else:
            hub[f"{model.name}.{tag}"] = _cfg(hf_hub_id=source["hub"], hf_hub_filename=source["file"])
    if hub:
        return hub | local
    return local | {
        f"{model.name}.untrained{'*' if local else ''}": _cfg()
    }  # `*`: the default, though it has no weights


def _local_cfg(local: str, num_classes: int, size: int, **others) -> dict:
    side = -(-size // 32)  # of the last map: four times halved from a quarter, rounded up
    input_size, pool_size = (3, size, size), (side, side)
    file = str(weights_folder() / local)
    return _cfg(file=file, num_classes=num_classes, input_size=input_size, pool_size=pool_size, **others)


def _register(model: ZooModel) -> None:
    """Give timm an entry point for a model of the zoo."""
    arch = {"dims": model.dims, "pattern": model.pattern, "window_size": model.window, "mixer": model.mixer}
    arch["depths"] = tuple(len(stage) for stage in parse_pattern(model.pattern))

    def entry_point(pretrained: bool = False, **kwargs) -> WBMM:
        return _create_wbmm(model.name, pretrained=pretrained, **{**arch, **kwargs})

    entry_point.__name__ = entry_point.__qualname__ = model.name
    entry_point.__doc__ = f"{model.name}: {model.task}, channels {model.dims}, blocks {model.pattern}."
    globals()[model.name] = register_model(entry_point)


default_cfgs = generate_default_cfgs(
    {tag: cfg for model in load_zoo().values() for tag, cfg in _zoo_cfgs(model).items()}
)

for _model in load_zoo().values():
    _register(_model)
