"""Operations that torch would send to a kernel this device has not: replaced by ones that it has."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decompositions

aten = torch.ops.aten


def register(library: Callable[[str, str], torch.library.Library]) -> None:
    """Attention as the CPU's flash operation, which keeps no square of it; recurrent layers in parts."""
    ours = library("aten", "AutogradPrivateUse1")
    ours.impl("scaled_dot_product_attention", _attention)
    for name, function in (
        ("lstm.input", decompositions.lstm_impl),
        ("lstm.data", decompositions.lstm_data_impl),
        ("gru.input", decompositions.gru_impl),
        ("gru.data", decompositions.gru_impl_data),
        ("rnn_tanh.input", decompositions.rnn_tanh_input),
        ("rnn_tanh.data", decompositions.rnn_tanh_data),
        ("rnn_relu.input", decompositions.rnn_relu_input),
        ("rnn_relu.data", decompositions.rnn_relu_data),
    ):
        ours.impl(name, function)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        blocked = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = blocked.masked_fill_(attn_mask.logical_not(), -math.inf)
    if not _is_flash(query, key, value, attn_mask, dropout_p) or enable_gqa:
        out, _ = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
        return out
    if attn_mask is not None:
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    out, _ = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return out


def _is_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
) -> bool:
    same = query.dim() == key.dim() == value.dim() == 4 and query.shape[-1] == value.shape[-1]
    return same and dropout_p == 0.0 and not (mask is not None and mask.requires_grad)
