"""Checkpoint: the model a solver runs, read in two steps: config and tokenizer, then weights."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, cast

import torch

from arbor import components
from arbor.errors import ModelError, UsageError
from arbor.kernels.base import AttentionBackend, AttentionShape
from arbor.kernels.fused import fused_ops
from arbor.kernels.linear import pack_linears
from arbor.memory.out_of_memory import is_out_of_memory, weights_too_large
from arbor.model.agreement import check_agreement, own_logits
from arbor.model.describe import ModelInfo, describe_attention
from arbor.model.fuse import fuse, unfuse
from arbor.model.graphs import CudaRecorder
from arbor.model.loading import (
    ModelLocation,
    eos_ids,
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    locate_model,
    revision_error,
    sampling_defaults,
)
from arbor.model.placement import (
    FLASHINFER,
    INVARIANT,
    device_of_model,
    dtype_name,
    refuse_batch_dependent,
    resolve_backend,
    resolve_device,
)
from arbor.model.runner import ModelRunner
from arbor.model.sampling_params import Sampling

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Files:
    """A model's config and tokenizer.

    Attributes:
        tokenizer: a Hugging Face tokenizer.
        info: sizes of the model, and whether it is supported.
        sampling: the sampling that the model's authors recommend.
        shapes: the distinct attention shapes of its layers.
    """

    tokenizer: Any
    info: ModelInfo
    sampling: Sampling
    shapes: tuple[AttentionShape, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """The model, ready to run.

    Attributes:
        runner: over the model with arbor's attention.
        eos: token ids that end a text.
    """

    runner: ModelRunner
    eos: tuple[int, ...]


class Checkpoint:
    """A model on disk, of the Hub or passed ready, read once for all threads.

    Args:
        model: a name, a directory, a Hub id, or a ready `PreTrainedModel` (then `tokenizer` too).
        tokenizer: for a ready model.
        revision, trust_remote_code, dtype, device, backend, deterministic, cuda_graphs: see
            `Solver`.

    Raises:
        UsageError: invalid settings; nothing was read.
        ModelError: the model does not exist.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any,
        tokenizer: Any,
        *,
        revision: str | None,
        trust_remote_code: bool,
        dtype: str,
        device: str,
        backend: str,
        deterministic: bool,
        cuda_graphs: bool,
    ) -> None:
        self._given = None if isinstance(model, str | os.PathLike) else model
        self._tokenizer = tokenizer
        self.dtype = dtype
        self.device = (
            resolve_device(device) if self._given is None else device_of_model(model, dtype, device)
        )
        self.deterministic = deterministic
        self.cuda_graphs = cuda_graphs
        self.backend = resolve_backend(backend, self.device, deterministic)
        self.source = (
            locate_model(model, revision, trust_remote_code)
            if self._given is None
            else ModelLocation(getattr(model, "name_or_path", "") or type(model).__name__, "")
        )
        if self._given is not None and tokenizer is None:
            raise UsageError("tokenizer", "a ready model needs its tokenizer.", "Pass tokenizer=….")
        if self._given is not None and revision is not None:
            raise revision_error(revision, "the model is loaded already")
        self._files: Files | None = None
        self._weights: Weights | None = None
        self._chosen: str | None = None  # the backend, once it was tried
        self._reading = threading.Lock()
        self._loading = threading.Lock()

    def close(self) -> None:
        """Drop config, tokenizer and weights."""
        self._files = self._weights = self._chosen = None

    def read(self) -> Files:
        """Config and tokenizer, read once.

        Raises:
            ModelError: unreadable.
        """
        with self._reading:
            if self._files is None:
                self._files = self._read()
            return self._files

    def load(self) -> Weights:
        """The weights, loaded once, checked against the model's own forward, packed where faster.

        Raises:
            ModelError: unsupported, incomplete or unreadable.
            UsageError: `deterministic`, and layers of the model depend on the batch.
        """
        with self._loading:
            if self._weights is None:
                self._weights = self._load(self.read())
            return self._weights

    def backend_name(self, info: ModelInfo) -> str:
        """The attention backend; ``auto`` is rowwise if deterministic (``invariant`` on CUDA), else
        FlashInfer or torch.

        FlashInfer wherever it is installed and has kernels for the model. Once the weights are
        loaded, the one in use.

        Raises:
            UsageError: FlashInfer was requested and has no kernel for this model.
        """
        if self._chosen is not None:
            return self._chosen
        if self.deterministic:
            return (
                "rowwise" if self.device.type == "cpu" or self.backend == "rowwise" else INVARIANT
            )
        if self.backend not in ("auto", FLASHINFER):
            return self.backend
        if self.device.type == "cuda" and find_spec(FLASHINFER) is not None:
            from arbor.kernels.flashinfer_cascade import DTYPES, HEAD_DIMS

            dtype: torch.dtype = getattr(torch, info.dtype)
            if dtype in DTYPES and set(info.head_dims) <= set(HEAD_DIMS):
                return FLASHINFER
            if self.backend == FLASHINFER:
                heads = " and ".join(map(str, info.head_dims))
                raise UsageError(
                    "backend",
                    f"--backend flashinfer: no kernels for {dtype_name(dtype)} and heads of {heads}.",
                    "Use --backend torch, or --dtype bfloat16 if it is the dtype.",
                )
        return "torch"

    def _backend(self, files: Files) -> AttentionBackend:
        name = self.backend_name(files.info)
        if name == FLASHINFER:
            found = self._flashinfer(files)
            if found is not None:
                self._chosen = name
                return found
            name = "torch"
        self._chosen = name
        return cast(AttentionBackend, components.build("backend", name))

    def _flashinfer(self, files: Files) -> AttentionBackend | None:
        """FlashInfer with every kernel this model needs tried once; None where ``auto`` has to do
        without.

        Raises:
            UsageError: FlashInfer was asked for and cannot run; the message names the module.
        """
        from arbor.kernels.flashinfer_cascade import FlashInferCascade, FlashInferUnusable

        try:
            backend = FlashInferCascade(self.device, getattr(torch, files.info.dtype))
            backend.probe(files.shapes)
        except FlashInferUnusable as error:
            if self.backend == FLASHINFER:
                raise UsageError(
                    "backend",
                    f"--backend flashinfer: {error}",
                    "Install arbor-search[cuda] and, to compile kernels, the CUDA toolkit; or use "
                    "--backend torch.",
                    module=error.name,
                ) from error
            logger.warning("attention runs in torch, slower: %s", error)
            return None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise weights_too_large(self.device, None) from error
        return backend

    def _read(self) -> Files:
        config = load_config(self.source) if self._given is None else self._given.config
        tokenizer = self._tokenizer or load_tokenizer(self.source)
        dtype = self.dtype if self._given is None else dtype_name(self._given.dtype)
        info, shapes = describe_attention(config, self.source, dtype=dtype)
        generation = (
            load_generation_config(self.source)
            if self._given is None
            else getattr(self._given, "generation_config", None)
        )
        return Files(tokenizer, info, sampling_defaults(generation), shapes)

    def _load(self, files: Files) -> Weights:
        info = files.info
        if not info.supported:
            raise ModelError("arch-unsupported", info.reason, "See 'arbor info MODEL'.")
        backend = self._backend(files)
        model = self._given or load_model(self.source, getattr(torch, info.dtype), self.device)
        if self.deterministic:
            refuse_batch_dependent(model, self.device)
        own, attention = own_logits(model), model.config._attn_implementation
        graphs = self.cuda_graphs and self.device.type == "cuda" and not self.deterministic
        recorder = CudaRecorder(self.device) if graphs else None
        runner = ModelRunner(model, backend, recorder, deterministic=self.deterministic)
        if runner.device.type == "cpu" or self.deterministic:
            pack_linears(model, deterministic=self.deterministic)
        ops = None if self.deterministic else fused_ops(runner.device)
        if ops is None:
            unfuse(model)  # a ready model that ran elsewhere
        else:
            fuse(model, ops)
        if own is not None:
            try:
                check_agreement(runner, own)
            except ModelError:
                model.set_attn_implementation(attention)  # or a second load would skip the check
                raise
        logger.info(
            "%s: %s weights, %s on %s, attention by %s",
            self.source.name,
            f"{info.parameters:,}",
            info.dtype,
            runner.device,
            type(backend).__name__,
        )
        return Weights(runner, eos_ids(model, files.tokenizer))
