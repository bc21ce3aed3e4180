"""A model's sizes and whether arbor runs it, from its config alone: no weights are read."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from arbor.errors import ModelError
from arbor.kernels.attention.base import AttentionShape
from arbor.memory.pool import LayerKV, bytes_per_token
from arbor.model.attention import (
    IMPLEMENTATION,
    LayerSpec,
    context_limit,
    probe,
    register_implementation,
    rotary,
)
from arbor.model.gguf.header import read_gguf_header
from arbor.model.gguf.weights import kept_bytes
from arbor.model.layers import find_layers
from arbor.model.loading import (
    ModelLocation,
    cached_commit,
    gguf_path,
    load_config,
    locate_model,
    needs_remote_code,
    one_at_a_time,
    remote_code_error,
    settled_dtype,
)
from arbor.model.model_info import ModelInfo
from arbor.model.names import check_dtype
from arbor.model.runner import OWN_ATTENTION, check_layer_types, check_specs, unsupported
from arbor.support.reason import reason_of

logger = logging.getLogger(__name__)

GROWING = "dynamic"  # type of a rotary embedding
EXPERTS = "batched_mm"  # the one way to run experts that computes shapes in every dtype


def describe(
    model: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ModelInfo:
    """A model's sizes from its config: the decoder is built without weights and probed.

    Args:
        model, revision, trust_remote_code: as in `locate_model`.
        dtype: as in `resolve_dtype`.

    Raises:
        ModelError: the model does not exist, or needs remote code. An unsupported one is described,
            not refused.
    """
    source = locate_model(model, revision, trust_remote_code)
    config = load_config(source)
    return describe_config(config, source, dtype=settled_dtype(source, dtype, "auto"))


def describe_config(config: Any, source: ModelLocation, *, dtype: str = "auto") -> ModelInfo:
    """`describe` for a config that is already read."""
    return describe_attention(config, source, dtype=dtype)[0]


def describe_attention(
    config: Any, source: ModelLocation, *, dtype: str = "auto"
) -> tuple[ModelInfo, tuple[AttentionShape, ...]]:
    """`describe_config`, and the distinct attention shapes of the layers; none if unsupported."""
    chosen = resolve_dtype(dtype, config)
    text = _text_of(config)
    reason, parameters = "", 0
    specs: tuple[LayerSpec, ...] = ()
    try:
        specs, parameters = _probe_without_weights(config, source)
    except ModelError as error:
        if error.code != "arch-unsupported":
            raise
        reason = error.message
    windows = [spec.shape.window for spec in specs if spec.shape.window is not None]
    layers = [
        LayerKV(s.shape.num_kv_heads, s.shape.head_dim_qk, s.shape.head_dim_vo) for s in specs
    ]
    first = specs[0].shape if specs else None
    info = ModelInfo(
        id=source.name,
        revision=cached_commit(source),
        architecture=_architecture(config),
        model_type=config.model_type,
        supported=not reason,
        reason=reason,
        layers=int(getattr(text, "num_hidden_layers", 0) or 0),
        num_qo_heads=first.num_qo_heads if first else 0,
        num_kv_heads=first.num_kv_heads if first else 0,
        head_dim=first.head_dim_qk if first else 0,
        head_dims=tuple(
            sorted({d for s in specs for d in (s.shape.head_dim_qk, s.shape.head_dim_vo)})
        ),
        window=min(windows, default=None),
        dtype=str(chosen).removeprefix("torch."),
        kv_bytes_per_token=bytes_per_token(layers, chosen),
        kv_bytes_int8=bytes_per_token(layers, torch.int8),
        parameters=parameters,
        weights_bytes=_bytes_in_a_file(source, chosen) or parameters * chosen.itemsize,
        context=context_limit(text),
        vocabulary=int(getattr(text, "vocab_size", 0) or 0),
    )
    return info, tuple(dict.fromkeys(spec.shape for spec in specs))


def _bytes_in_a_file(source: ModelLocation, dtype: torch.dtype) -> int:
    """Bytes of the weights of a GGUF file as they are loaded on a CPU; 0 for other models."""
    header = None if source.gguf is None else read_gguf_header(gguf_path(source))
    return 0 if header is None else kept_bytes(header, dtype)


def _architecture(config: Any) -> str:
    named = getattr(config, "architectures", None)
    if isinstance(named, list) and named and isinstance(named[0], str):
        return str(named[0])
    return type(config).__name__


@one_at_a_time
def _probe_without_weights(config: Any, source: ModelLocation) -> tuple[tuple[LayerSpec, ...], int]:
    from transformers import AutoModelForCausalLM

    register_implementation()
    text = _text_of(config)
    check_layer_types(text)
    _check_rotary(text)
    config = copy.deepcopy(config)  # transformers writes to it
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                attn_implementation=IMPLEMENTATION,
                experts_implementation=EXPERTS,
                trust_remote_code=source.trust_remote_code,
            )
    except Exception as error:  # transformers checks little of what a config holds
        if needs_remote_code(error):
            raise remote_code_error(source.label) from error
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
            raise unsupported(config, OWN_ATTENTION) from error
        reason = f"transformers cannot build it ({reason_of(error).rstrip('.')})"
        raise unsupported(config, reason) from error
    parameters = sum(p.numel() for p in model.parameters())
    text = config.get_text_config()
    if _positions_know_padding(model):
        raise own_positions(config)
    specs = check_specs(_probed(model, text), text)
    find_layers(model, len(specs))
    return specs, parameters


def _probed(model: Any, text: Any) -> tuple[LayerSpec | None, ...]:
    """The calls of each layer of a model on the meta device.

    A forward that reads values fails there. One that looks for padding runs again without, and any
    other on the CPU with zeros as weights.

    Args:
        text: the config of its decoder.

    Raises:
        ModelError: the forward fails with zeros too.
    """
    layers = int(text.num_hidden_layers)
    for without_padding in (False, True):
        try:
            with _no_padding(text, model.config) if without_padding else nullcontext():
                return probe(model, layers)
        except Exception as error:  # remote code may fail in any way
            logger.debug("it does not run without weights: %s", error)
    find_layers(model, layers)
    try:
        return probe(_with_zeros(model), layers)
    except Exception as error:
        raise unsupported(text, forward_fails(error)) from error


@contextmanager
def _no_padding(*configs: Any) -> Iterator[None]:
    """Within, configs name no padding token; some raise an error instead."""
    named = [getattr(config, "pad_token_id", None) for config in configs]
    try:
        for config in configs:
            config.pad_token_id = None
        yield
    finally:
        for config, token in zip(configs, named, strict=True):
            config.pad_token_id = token


def _with_zeros(model: Any) -> Any:
    """The model on the CPU, its tensors views of one of zeros, of which no page is written.

    Args:
        model: on the meta device; changed in place.
    """
    model.float()
    tensors = [*model.parameters(), *model.buffers()]
    zeros = torch.from_numpy(np.zeros(max(each.nbytes for each in tensors), np.uint8))

    def zero(like: Tensor) -> Tensor:
        return zeros[: like.nbytes].view(like.dtype).view(like.shape)

    return model._apply(zero)


def _positions_know_padding(model: Any) -> bool:
    """Whether an embedding of positions has a place for padding: positions are counted from it, and
    only over the tokens that are none."""
    return any(
        "position" in name and isinstance(each, nn.Embedding) and each.padding_idx is not None
        for name, each in model.named_modules()
    )


def _text_of(config: Any) -> Any:
    """The config of the decoder; where there are several, as of an encoder too, the whole."""
    try:
        return config.get_text_config()
    except ValueError:
        return config


def _check_rotary(config: Any) -> None:
    """Refuse a rotary embedding that rotates all keys anew as a path grows."""
    if any(kind == GROWING for kind, _ in rotary(config)):
        raise unsupported(
            config,
            f"its rotary embedding of type '{GROWING}' rotates the keys of a path anew as it grows",
        )


def own_positions(config: Any) -> ModelError:
    """The error of a model whose forward does not count positions from 0, as arbor does."""
    return unsupported(config, "its positions come from the tokens, not from their places")


def forward_fails(error: Exception) -> str:
    """What is wrong with a model whose forward fails, as part of a sentence."""
    return f"its own forward fails ({reason_of(error).rstrip('.')})"


def resolve_dtype(dtype: str, config: Any) -> torch.dtype:
    """`auto` is the dtype that the config states, or float32; otherwise a torch dtype by name.

    Where a config states none, `settled_dtype` asks the weights before.

    Raises:
        UsageError: unknown or unsupported dtype.
    """
    check_dtype(dtype)
    if dtype == "auto":
        saved = getattr(config, "dtype", None)
        return saved if isinstance(saved, torch.dtype) else torch.float32
    found: torch.dtype = getattr(torch, dtype)
    return found
