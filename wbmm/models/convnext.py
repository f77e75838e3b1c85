"""ConvNeXt with WBMM in the place of its 7x7 depthwise convolutions, a 3x3 one at every second block.

The net is timm's; only the spatial operator differs. Paper: "Cross-Architecture Validation on ConvNeXt-T".
"""

from collections.abc import Sequence

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.convnext import ConvNeXt

from .replace import replace_depthwise

__all__ = ["ConvNeXtWBMM"]


class ConvNeXtWBMM(ConvNeXt):
    """timm's ConvNeXt after `replace_depthwise`; `replaced` is its report.

    Args:
        depths: blocks of each stage.
        pattern: as in `replace_depthwise`. By default W and D alternate in each of the first three stages, and the last
            one, whose map at 224 pixels is one window, is W: WDW, WDW, WDWDWDWDW, WWW for T.
        window_size: of WBMM, an int or (wh, ww).
        output_stride: 32; windows have no dilated form.
        **kwargs: as in `timm.models.convnext.ConvNeXt`.
    """

    def __init__(
        self,
        depths: Sequence[int] = (3, 3, 9, 3),
        pattern: str | Sequence[str] | None = None,
        window_size: int | tuple[int, int] = 7,
        output_stride: int = 32,
        **kwargs,
    ) -> None:
        if output_stride != 32:
            raise ValueError(f"output_stride {output_stride}: expected 32, since WBMM has no dilated form")
        super().__init__(depths=tuple(depths), **kwargs)
        pattern = alternating_pattern(depths) if pattern is None else pattern
        self.replaced = replace_depthwise(self, window=window_size, pattern=pattern)


def alternating_pattern(depths: Sequence[int]) -> tuple[str, ...]:
    """W, D, W, ... in every stage but the last, which is all W."""
    *early, last = depths
    return (*(("WD" * depth)[:depth] for depth in early), "W" * last)


def _create_convnext_wbmm(variant: str, pretrained: bool = False, **kwargs) -> ConvNeXtWBMM:
    return build_model_with_cfg(
        ConvNeXtWBMM,
        variant,
        pretrained,
        feature_cfg={"out_indices": (0, 1, 2, 3), "flatten_sequential": True},
        **kwargs,
    )


def _cfg(**kwargs) -> dict:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stem.0",
        "classifier": "head.fc",
        "license": "apache-2.0",
        **kwargs,
    }


default_cfgs = generate_default_cfgs({"convnext_atto_wbmm.untrained": _cfg(), "convnext_tiny_wbmm.untrained": _cfg()})


@register_model
def convnext_atto_wbmm(pretrained: bool = False, **kwargs) -> ConvNeXtWBMM:
    """For comparisons on small data; the paper has none of this size."""
    arch = {"depths": (2, 2, 6, 2), "dims": (40, 80, 160, 320), "conv_mlp": True}
    return _create_convnext_wbmm("convnext_atto_wbmm", pretrained=pretrained, **{**arch, **kwargs})


@register_model
def convnext_tiny_wbmm(pretrained: bool = False, **kwargs) -> ConvNeXtWBMM:
    arch = {"depths": (3, 3, 9, 3), "dims": (96, 192, 384, 768)}
    return _create_convnext_wbmm("convnext_tiny_wbmm", pretrained=pretrained, **{**arch, **kwargs})
