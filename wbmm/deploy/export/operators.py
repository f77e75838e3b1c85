"""The operators that a program in a .pt2 file may call, by the names that torch.export writes.

Collected by exporting, with a fixed size, any batch and any size: the training, compact and dense forms of the family
(plain, hierarchical and multi-kernel, every padding mode), every mixer, UniRepLKNet, ConvNeXt with and without WBMM,
feature maps, bytes as input, UPerNet, FPN, and ResNet, RegNet, EfficientNet, MobileNet, ViT, Swin and RepViT of timm's.
Each computes tensors from tensors, or numbers from sizes, and nothing else. `wbmm export` names an operator that is
missing here: before it is added, make sure that it reads no file, writes none and calls nothing that it is given.
"""

__all__ = ["OPERATORS"]

_ATEN = """
    _assert_tensor_metadata.default adaptive_avg_pool2d.default add.Tensor add_.Tensor addcmul.default
    alias.default arange.default baddbmm.default batch_norm.default cat.default clamp_min.default
    clone.default contiguous.default conv2d.default div.Tensor div.Tensor_mode dropout.default expand.default
    eye.default
    feature_dropout.default flatten.using_ints flip.default ge.Tensor gelu.default hardsigmoid.default
    hardswish_.default index.Tensor index_select.default layer_norm.default linalg_vector_norm.default
    linear.default logical_and.default lt.Tensor matmul.default max_pool2d.default mean.dim mul.Tensor
    new_ones.default pad.default permute.default relu.default relu_.default reshape.default roll.default
    scaled_dot_product_attention.default select.int sigmoid.default silu_.default slice.Tensor softmax.int
    sqrt.default square.default squeeze.dim stack.default sub.Tensor sum.dim_IntList sym_size.int to.dtype
    transpose.int unbind.int unsqueeze.default upsample_bilinear2d.vec upsample_nearest2d.vec view.default
"""
_ON_SIZES = ("add", "floordiv", "mod", "mul", "neg", "sub")
_OURS = "torch.ops.wbmm.windowed_product.default"

OPERATORS = frozenset(
    [*(f"torch.ops.aten.{name}" for name in _ATEN.split()), *(f"_operator.{name}" for name in _ON_SIZES), _OURS]
)
