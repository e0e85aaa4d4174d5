"""Mixed precision on the device: the lists that torch's autocast has for accelerators, as kernels of ours.

Lists: torch documentation, "CUDA Ops that can autocast", 2.13.
"""

from collections.abc import Callable
from typing import Any

import torch

from evener.rehearsal.device.tensor import NAME

LOWER = (
    "__matmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul convolution conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d.input conv_transpose3d.input linear matmul mm mv prelu "
    "linalg_vecdot scaled_dot_product_attention"
)
FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm "
    "group_norm frobenius_norm.dim nuclear_norm cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss "
    "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist "
    "renorm logsumexp softmax.int log_softmax.int cumprod cumsum prod sum norm.Scalar "
    "norm.ScalarOpt_dim cross_entropy_loss"
)
_ITSELF = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]


def register(library: Callable[[str, str], torch.library.Library]) -> None:
    """Everything passes autocast as it is, but for the operations of the two lists."""
    library("_", "AutocastPrivateUse1").fallback(torch.library.fallthrough_kernel)
    ours = library("aten", "AutocastPrivateUse1")
    for names, cast in ((LOWER, _lower), (FLOAT32, _float32)):
        for name in names.split():
            func = _overload(name)
            if func is not None:
                ours.impl(name, _casting(func, cast))


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, overload or "default", None) if packet is not None else None


def _casting(func: Any, cast: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_ITSELF):
            return func(*map(cast, args), **{k: cast(v) for k, v in kwargs.items()})

    return run


def _lower(value: Any) -> Any:
    return _cast(value, torch.get_autocast_dtype(NAME))


def _float32(value: Any) -> Any:
    return _cast(value, torch.float32)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        fits = value.is_floating_point() and value.dtype is not torch.float64 and value.device.type == NAME
        return value.to(dtype) if fits and value.dtype is not dtype else value
    if type(value) in (list, tuple):
        return type(value)(_cast(v, dtype) for v in value)
    return value
