"""Arbor's attention under unmodified Hugging Face decoders, and a probe of each layer's calls.

`context_limit` is the longest path on which all keys are rotated alike.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from arbor.kernels.attention.base import AttentionShape
from arbor.kernels.fused.rotary import RotaryForm, RotaryOps
from arbor.memory.pool import KVPool

logger = logging.getLogger(__name__)

IMPLEMENTATION = "arbor_paged"
# The same, but transformers also makes the masks of sliding windows: for one forward of `probe`.
WITH_MASKS = "arbor_with_masks"
WINDOW = "arbor_window"  # attribute of such a mask, and of a layer that has its window from one


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


def written(call: AttentionCall, pool: KVPool, slots: Tensor) -> Tensor:
    """The queries of a call, position-encoded; its keys and values are in their slots.

    Args:
        call: of a layer.
        pool: whose slots.
        slots: int64 [T], of the rows.

    Returns:
        [T, H_q, D_k].
    """
    rotation = call.rotation
    if rotation is None:
        pool.write(call.layer, slots, call.k, call.v)
        return call.q
    tables = (rotation.cos, rotation.sin, rotation.form)
    if pool.dtype == call.k.dtype:
        pools = pool.k[call.layer], pool.v[call.layer]
        return rotation.ops.rotate_and_write(call.q, call.k, call.v, *tables, pools, slots)
    q, k = rotation.ops.rotate(call.q, call.k, *tables)
    pool.write(call.layer, slots, k, call.v)
    return q


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
        module: the attention layer; only `layer_idx`, `is_causal` where it says False, and the
            window that `probe` left there, are read.
        attention_mask: None, unless the layer makes a mask of its own, or the model runs with
            `WITH_MASKS`.
        query: [1, H_q, T, D_k]; key: [1, H_kv, T, D_k]; value: [1, H_kv, T, D_v].
        scaling, sliding_window, softcap, s_aux: what this layer asks; never read from the config.
            A layer that leaves its window to its mask has the window that `probe` found in that.

    Returns:
        ([1, T, H_q, D_v], None).
    """
    attend = _ATTEND.get()
    assert attend is not None, "this model's attention belongs to arbor; call it through an Engine"
    masked: int | None = getattr(attention_mask, WINDOW, None)
    if sliding_window is None:
        if masked is not None:
            setattr(module, WINDOW, masked)
        sliding_window = getattr(module, WINDOW, None)
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
        causal=(attention_mask is None or masked is not None)
        and getattr(module, "is_causal", True) is not False,
    )
    return attend(call).unsqueeze(0), None


def text_config(model: Any) -> Any:
    """The config of a model's decoder: its own, or one of several within it."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def has_arbors_attention(model: Any) -> bool:
    """Whether a model's decoder calls `arbor_paged`; of several configs, only its own says so."""
    return getattr(text_config(model), "_attn_implementation", None) == IMPLEMENTATION


@functools.cache
def register_implementation() -> None:
    """Makes the implementation known to transformers; only now imports its modelling code."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, arbor_paged)
    AttentionInterface.register(WITH_MASKS, arbor_paged)
    AttentionMaskInterface.register(WITH_MASKS, window_mask)


def window_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Any,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The function transformers calls for masks of `WITH_MASKS`.

    Args:
        mask_function: whether the query at one position reads the key at another.
        local_size: None: the mask is not of a window or chunks.
        batch_size, q_length, kv_length, device: of the mask.

    Returns:
        None where there is no `local_size`; else a mask without values that says its window as the
        attribute `WINDOW`, if it is causal and has that window.
    """
    if local_size is None:
        return None
    mask = torch.zeros(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    if _is_window(mask_function, local_size):
        setattr(mask, WINDOW, local_size)
    return mask


def _is_window(mask_function: Any, window: int) -> bool:
    """Whether each query reads itself and the `window` - 1 keys before it, and no other."""
    for at in (0, window - 1, window, 2 * window + 1):
        query, keys = torch.tensor(at, device="cpu"), torch.arange(at + 2, device="cpu")
        wanted = (keys > at - window) & (keys <= at)
        if not torch.equal(torch.as_tensor(mask_function(0, 0, query, keys)), wanted):
            return False
    return window > 0


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

    Some models leave the window to the mask of a layer and ask for none. If the config has a window
    that layers do not ask for, the token runs a second time, with masks: a layer's own says its
    window, and one without a mask has none.

    Returns:
        one entry per layer; not causal where a mask is of an unknown kind.
    """
    specs = _specs(model, layers)
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    if (
        not isinstance(window, int)
        or not 0 < window < context_limit(config)
        or all(spec is None or spec.shape.window is not None for spec in specs)
    ):
        return specs
    own = config._attn_implementation
    try:
        model.set_attn_implementation(WITH_MASKS)  # type: ignore[operator]
        return _specs(model, layers, masks=True)
    except Exception as error:  # code that comes with weights may fail in any way
        logger.debug("its masks are unknown: %s", error)
        kinds = getattr(config, "layer_types", None) or ()
        full = {i for i, kind in enumerate(kinds) if kind == "full_attention"}
        return tuple(
            dataclasses.replace(spec, causal=False)
            if spec is not None and spec.shape.window is None and layer not in full
            else spec
            for layer, spec in enumerate(specs)
        )
    finally:
        model.set_attn_implementation(own)  # type: ignore[operator]


def _specs(model: nn.Module, layers: int, masks: bool = False) -> tuple[LayerSpec | None, ...]:
    """The calls of each layer in a forward of one token.

    masks: the token is said not to be padding, so that no mask depends on values, which models on
        the meta device do not have.
    """
    specs: list[LayerSpec | None] = [None] * layers

    def record(call: AttentionCall) -> Tensor:
        before = specs[call.layer]
        calls = 1 if before is None else before.calls + 1
        specs[call.layer] = LayerSpec(call.shape, call.sinks is not None, call.causal, calls)
        return call.q.new_zeros(call.q.shape[0], call.shape.num_qo_heads, call.shape.head_dim_vo)

    device = next(model.parameters()).device
    one = torch.zeros(1, 1, dtype=torch.int64, device=device)
    given = {"attention_mask": torch.ones_like(one)} if masks else {}
    with answered_by(record):
        model(input_ids=one, position_ids=one.clone(), use_cache=False, **given)
    return tuple(specs)


DEFAULT_CONTEXT = 2048  # of configs without a length


def context_limit(config: Any) -> int:
    """The longest path, in tokens, on which all K/V are rotated alike.

    Dynamic NTK and longrope choose the rotation by the largest position in the batch, so a path
    that outgrows the length they begin to rescale at would be attended with keys of two scales. Up
    to that length they are exact.

    Args:
        config: a text config.

    Returns:
        the model's context length, or the length at which its rotary embedding would begin to
        rescale.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    for kind, rope in rotary(config):
        if kind == "longrope":
            outside = getattr(config, "original_max_position_embeddings", None)
            first = rope.get("original_max_position_embeddings") or outside or limit
            limit = min(limit, int(first))
    return limit


def rotary(config: Any) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """Type and parameters of each rotary embedding: one, or one per type of layers.

    Args:
        config: a text config.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [part for part in rope.values() if isinstance(part, Mapping)]
    for part in parts or [rope]:
        yield part.get("rope_type", part.get("type")), part
