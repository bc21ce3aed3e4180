"""A model's sizes and whether arbor runs it, from its config alone: no weights are read."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

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
from arbor.model.runner import check_layer_types, check_specs

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
    text = config.get_text_config()
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
    check_layer_types(config.get_text_config())
    _check_rotary(config)
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
        raise _unbuilt(
            config, "transformers cannot build it with arbor's attention", error
        ) from error
    parameters = sum(p.numel() for p in model.parameters())
    text = config.get_text_config()
    try:
        # the tokens have no values, and padding would be looked for among them
        text.pad_token_id = model.config.pad_token_id = None  # some configs refuse that
        specs = probe(model, int(text.num_hidden_layers))
    except Exception as error:  # remote code may fail in any way without weights
        raise _unbuilt(config, "it does not run without weights", error) from error
    return check_specs(specs, text), parameters


def _check_rotary(config: Any) -> None:
    """Refuse a rotary embedding that rotates all keys anew as a path grows."""
    if any(kind == GROWING for kind, _ in rotary(config.get_text_config())):
        raise ModelError(
            "arch-unsupported",
            f"model_type '{config.model_type}': its rotary embedding of type '{GROWING}' rotates"
            " the keys of a path anew as it grows.",
            model_type=config.model_type,
        )


def _unbuilt(config: Any, what: str, error: Exception) -> ModelError:
    lines = str(error).splitlines() or [type(error).__name__]
    return ModelError(
        "arch-unsupported",
        f"model_type '{config.model_type}': {what} ({lines[0]}).",
        model_type=config.model_type,
    )


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
