"""OpenVINO files: an .xml and the .bin beside it, made from an ONNX graph that OpenVINO runs fast.

Between convolutions OpenVINO keeps maps channels-last by itself, and transposes for everything that is written for
channels-last maps. So the linears of the feed-forward part become 1x1 convolutions (`to_onnx.py`), windows of tables
convolutions, and norms over channels reductions of NCHW maps. What it is worth is in docs/speed.md.
"""

import io
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor

from wbmm.extras import need
from wbmm.io.card import ModelCard
from wbmm.io.digest import DIGEST_KEY, EMPTY, seal
from wbmm.io.reader import METADATA_KEY
from wbmm.layers.block import FusedBlock
from wbmm.models.wbmm import Downsample, Stem

from .graph import ConvolvedMixer, make_opaque

__all__ = ["MapNorm", "WindowBlock", "openvino_from_onnx", "rewrite_for_openvino", "save_openvino"]

_PAIRS = {Stem: (("conv1", "norm1"), ("conv2", "norm2")), Downsample: (("conv", "norm"),)}


class MapNorm(nn.Module):
    """A layer norm over the channels of `[B, C, H, W]`, as reductions over them.

    Args:
        norm: what it computes.
        centred: its input has mean zero over channels already.
    """

    def __init__(self, norm: LayerNorm2d, centred: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.centred = norm.weight, norm.bias, norm.eps, centred

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.centred else x - x.mean(1, keepdim=True)
        variance = torch.linalg.vector_norm(x, dim=1, keepdim=True).square() / x.shape[1]
        return x * torch.rsqrt(variance + self.eps) * self.weight[:, None, None] + self.bias[:, None, None]


class WindowBlock(nn.Module):
    """A fused block whose mixer cuts windows, gated while the map is `[B, H, W, C]` in the graph.

    The windows are merged to such a map, and the first linear, a convolution, reads it as it is: nothing is transposed.
    """

    def __init__(self, block: FusedBlock) -> None:
        super().__init__()
        self.mixer, self.se, self.ffn = block.mixer, block.se, block.ffn

    def forward(self, x: Tensor) -> Tensor:
        out = self.mixer(x)
        known = all(isinstance(side, int) for side in x.shape[2:])  # a comparison would fix a dynamic size
        if known and list(x.shape[2:]) == list(self.mixer.mixer.window):  # a single window is not cut
            return self.ffn(out, self.se(out), x)
        last = out.permute(0, 2, 3, 1)
        gate = torch.sigmoid(self.se.fc2(F.relu(self.se.fc1(last.mean((1, 2))))))
        return self.ffn((last * gate[:, None, None]).permute(0, 3, 1, 2), None, x)


def _is_affine(module: nn.Module) -> bool:
    return type(module) is LayerNorm2d and module.weight is not None and module.bias is not None


@torch.no_grad()
def _centre(conv: nn.Conv2d) -> None:
    """Takes the mean over output channels out of a convolution's result: out of its weight and bias."""
    conv.weight.sub_(conv.weight.mean(0, keepdim=True))
    conv.bias.sub_(conv.bias.mean())


def rewrite_for_openvino(net: nn.Module) -> nn.Module:
    """Rewrites a fused model in place, into what OpenVINO runs fast."""
    for parent in list(net.modules()):
        for conv, norm in _PAIRS.get(type(parent), ()):
            if _is_affine(getattr(parent, norm)):
                _centre(getattr(parent, conv))
                setattr(parent, norm, MapNorm(getattr(parent, norm), centred=True))
        for name, child in parent.named_children():
            if _is_affine(child):
                setattr(parent, name, MapNorm(child, centred=False))
    make_opaque(net, convolutions=True)
    for parent in list(net.modules()):
        for name, child in parent.named_children():
            if type(child) is FusedBlock and child.se is not None and isinstance(child.mixer, ConvolvedMixer):
                setattr(parent, name, WindowBlock(child))
    return net


def openvino_from_onnx(converted):
    """The `openvino.Model` of a `torch.onnx.ONNXProgram`."""
    openvino = need("openvino")
    return openvino.convert_model(io.BytesIO(converted.model_proto.SerializeToString()))


def save_openvino(model, card: ModelCard, path: Path, half: bool = False) -> None:
    """Writes `path` (.xml) and the .bin beside it."""
    model.set_rt_info(card.to_json(), [METADATA_KEY])
    model.set_rt_info(EMPTY, [DIGEST_KEY])
    need("openvino").save_model(model, path, compress_to_fp16=half)
    seal(path)
