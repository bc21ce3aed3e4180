"""Arbor's attention under unmodified Hugging Face decoders, and a probe of each layer's calls."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from arbor.kernels.base import AttentionShape
from arbor.kernels.rotary import RotaryForm, RotaryOps

IMPLEMENTATION = "arbor_paged"


@dataclass(frozen=True, slots=True)
class Rotation:
    """The position embedding of a call's queries and keys.

    cos, sin: tables of the rows, [T, numbers]; form: None where a layer has no position embedding;
    ops: the kernel.
    """

    cos: Tensor
    sin: Tensor
    form: RotaryForm | None
    ops: RotaryOps


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call, as the model makes it.

    q: [T, H_q, D_k], k: [T, H_kv, D_k], v: [T, H_kv, D_v]; sinks: [H_q] or None; causal: the layer
    asks for causal attention and for no mask of its own; rotation: what position-encodes q and k;
    None: the layer has done so.
    """

    layer: int
    shape: AttentionShape
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    causal: bool
    rotation: Rotation | None = None


class Attend(Protocol):
    """Answers a layer's call with its output, [T, H_q, D_v]."""

    def __call__(self, call: AttentionCall) -> Tensor: ...


# Some models drop unknown keyword arguments on the way to their attention (stablelm, nemotron), so
# what answers the calls of the forward in progress travels in a context variable. Two engines in
# one process do not meet in it.
_ATTEND: ContextVar[Attend | None] = ContextVar("arbor_attend", default=None)


@contextmanager
def answered_by(attend: Attend) -> Iterator[None]:
    """Within, `attend` answers every attention call of models with our implementation."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def answering() -> Attend | None:
    """What answers the attention calls of the forward in progress; None outside of any."""
    return _ATTEND.get()


def arbor_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls for `attn_implementation="arbor_paged"`.

    Args:
        module: the attention layer; only `layer_idx`, and `is_causal` where it says False, are
            read.
        attention_mask: None, unless the layer makes a mask of its own.
        query: [1, H_q, T, D_k]; key: [1, H_kv, T, D_k]; value: [1, H_kv, T, D_v].
        scaling, sliding_window, softcap, s_aux: what this layer asks; never read from the module or
            the config.

    Returns:
        ([1, T, H_q, D_v], None).
    """
    attend = _ATTEND.get()
    assert attend is not None, "this model's attention belongs to arbor; call it through an Engine"
    shape = AttentionShape(
        num_qo_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim_qk=query.shape[3],
        head_dim_vo=value.shape[3],
        scaling=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
    )
    call = AttentionCall(
        layer=module.layer_idx,  # type: ignore[arg-type]
        shape=shape,
        q=query[0].transpose(0, 1),
        k=key[0].transpose(0, 1),
        v=value[0].transpose(0, 1),
        sinks=s_aux,
        causal=attention_mask is None and getattr(module, "is_causal", True) is not False,
    )
    return attend(call).unsqueeze(0), None


@functools.cache
def register_implementation() -> None:
    """Makes the implementation known to transformers; only now imports its modelling code."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, arbor_paged)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The attention of one layer, as probed.

    Attributes:
        shape: heads, scaling, window, softcap.
        sinks: whether it has attention sinks.
        causal: see `AttentionCall`.
        calls: attention calls in one forward.
    """

    shape: AttentionShape
    sinks: bool
    causal: bool
    calls: int


@torch.inference_mode()
def probe(model: nn.Module, layers: int) -> tuple[LayerSpec | None, ...]:
    """Run one token and record each layer's attention call.

    Flags and configs are not trusted: a config may name KV heads the model does not use, and some
    models accept our implementation without ever calling it. A layer that never called is None.

    Returns:
        one entry per layer.
    """
    specs: list[LayerSpec | None] = [None] * layers

    def record(call: AttentionCall) -> Tensor:
        before = specs[call.layer]
        calls = 1 if before is None else before.calls + 1
        specs[call.layer] = LayerSpec(call.shape, call.sinks is not None, call.causal, calls)
        return call.q.new_zeros(call.q.shape[0], call.shape.num_qo_heads, call.shape.head_dim_vo)

    device = next(model.parameters()).device
    one = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with answered_by(record):
        model(input_ids=one, position_ids=one.clone(), use_cache=False)
    return tuple(specs)
