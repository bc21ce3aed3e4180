"""Checkpoint: the model a solver runs, read in two steps: config and tokenizer, then weights."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from arbor.errors import ModelError, UsageError
from arbor.model.description_cache import kept_description
from arbor.model.files import Description, Files
from arbor.model.loading import ModelLocation, locate_model, revision_error, settled_dtype
from arbor.model.model_info import ModelInfo
from arbor.model.names import INT8, check_device, check_kv_dtype, check_weights
from arbor.model.placement import (
    FLASHINFER,
    INVARIANT,
    NATIVE,
    check_backend,
    check_int8,
    device_of_model,
    dtype_name,
    resolve_backend,
    resolve_device,
    runs_native,
)
from arbor.support.garbage import no_collection
from arbor.support.stages import stage_of

if TYPE_CHECKING:
    import torch

    from arbor.model.int8_weights import WeightRounding
    from arbor.model.weights import Weights


class Checkpoint:
    """A model on disk, of the Hub or passed ready, read once for all threads.

    Args:
        model: a name, a directory, a Hub id, or a ready `PreTrainedModel` (then `tokenizer` too).
        tokenizer: for a ready model.
        revision, trust_remote_code, dtype, device, backend, deterministic, cuda_graphs, kv_dtype,
        weights, adapter: see `Solver`.

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
        kv_dtype: str = "auto",
        weights: str = "auto",
        adapter: str | os.PathLike[str] | None = None,
    ) -> None:
        self.kv_dtype = check_kv_dtype(kv_dtype)
        if self.kv_dtype == INT8:
            check_int8(check_backend(backend), check_device(device))
        self.weights = check_weights(weights, check_device(device))
        self._given = None if isinstance(model, str | os.PathLike) else model
        self._tokenizer = tokenizer
        self.dtype = dtype
        self.asked_device = device
        self._device: torch.device | None = None  # resolved late, since that imports torch
        if self._given is not None:
            self._device = device_of_model(model, dtype, device)
        elif check_device(device).startswith("cuda"):
            self._device = resolve_device(device)
        self.deterministic = deterministic
        self.cuda_graphs = cuda_graphs
        self.backend = check_backend(backend)
        if deterministic or backend in (FLASHINFER, INVARIANT, NATIVE):
            self.backend = resolve_backend(backend, self.device, deterministic)
        self.source = (
            locate_model(model, revision, trust_remote_code, adapter)
            if self._given is None
            else ModelLocation(getattr(model, "name_or_path", "") or type(model).__name__, "")
        )
        if self._given is not None and tokenizer is None:
            raise UsageError("tokenizer", "a ready model needs its tokenizer.", "Pass tokenizer=….")
        if self._given is not None and revision is not None:
            raise revision_error(revision, "the model is loaded already")
        if self._given is not None and adapter is not None:
            raise UsageError(
                "adapter", "the model is loaded already.", "Merge the adapter into it, with peft."
            )
        self._description: Description | None = None  # of an earlier process
        self._files: Files | None = None
        self._weights: Weights | None = None
        self._reading = threading.Lock()
        self._loading = threading.Lock()

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        if self._device is None:
            self._device = resolve_device(self.asked_device)
        return self._device

    @property
    def rounding(self) -> WeightRounding | None:
        """What weights in 8 bits changed; None without them, or before they are loaded."""
        return None if self._weights is None else self._weights.rounding

    def close(self) -> None:
        """Drop config, tokenizer and weights."""
        self._description = self._files = self._weights = None

    def read(self) -> Description:
        """The description of the model, read once; without torch where an earlier process kept it.

        Raises:
            ModelError: unreadable.
        """
        with self._reading:
            known = self._files or self._description
            if known is not None:
                return known
            light = "torch" not in sys.modules and self._given is None and self._tokenizer is None
            if light:
                kept = kept_description(self.source, self._settled_dtype())
                self._description = kept and replace(kept, info=self._as_kept(kept.info))
            return self._description or self._read(keep=light)

    def read_files(self) -> Files:
        """Config and tokenizer, read once.

        Raises:
            ModelError: unreadable.
        """
        with self._reading:
            return self._files or self._read(keep=False)

    def load(self) -> Weights:
        """The weights, loaded once, checked against the model's own forward, packed where faster.

        Raises:
            ModelError: unsupported, incomplete or unreadable.
            UsageError: `deterministic`, and layers of the model depend on the batch; or FlashInfer
                was requested and cannot run.
        """
        with self._loading:
            if self._weights is None:
                files = self.read_files()
                if not files.info.supported:
                    reason, hint = files.info.reason, "See 'arbor info MODEL'."
                    raise ModelError("arch-unsupported", reason, hint)
                self._weights = self._load(files)
            return self._weights

    def _load(self, files: Files) -> Weights:
        from arbor.model.weights import load_weights

        with stage_of(f"loading {self.source.label}"):
            return load_weights(
                self.source,
                self._ready_model(files),
                files,
                device=self.device,
                backend=self.backend_name(files.info),
                required=self.backend == FLASHINFER,
                deterministic=self.deterministic,
                cuda_graphs=self.cuda_graphs,
                int8_kv=self.kv_dtype == INT8,
                int8_weights=self.weights == INT8,
            )

    def _ready_model(self, files: Files) -> Any:
        """The model as it was passed; None: its weights are read as those of a `*ForCausalLM`.

        Args:
            files: its config and tokenizer.
        """
        return self._given

    def _read(self, keep: bool) -> Files:
        with stage_of(f"reading {self.source.label}"), no_collection():
            from arbor.model.weights import read_files

            dtype = self._settled_dtype()
            files = read_files(self.source, self._given, self._tokenizer, dtype, keep=keep)
        self._files = replace(files, info=self._as_kept(files.info))
        return self._files

    def _settled_dtype(self) -> str:
        """The dtype to read the model in, as in `resolve_dtype`."""
        return settled_dtype(self.source, self.dtype, self.asked_device)

    def _as_kept(self, info: ModelInfo) -> ModelInfo:
        """The model with weights and KV as they are kept here."""
        info = replace(info, weights=self.weights)
        return info.with_int8_kv() if self.kv_dtype == INT8 else info

    def backend_name(self, info: ModelInfo) -> str:
        """The attention backend; ``auto`` is FlashInfer on CUDA and native on a CPU, else torch.

        Each where it is installed and computes the model; deterministic: native or rowwise on a
        CPU, ``invariant`` on CUDA. Once the weights are loaded, the one in use.

        Raises:
            UsageError: the backend that was requested does not compute this model, or none reads
                8-bit KV on this device.
        """
        if self._weights is not None:
            return self._weights.backend
        if self.kv_dtype == INT8:
            check_int8(self.backend, str(self.device))
        native = runs_native(info, self.device)
        if self.deterministic:
            if self.backend == NATIVE and not native:
                heads = " and ".join(map(str, info.head_dims))
                raise UsageError(
                    "backend",
                    f"--backend native: no kernels for {info.dtype} and heads of {heads}.",
                    "Use --backend rowwise.",
                )
            if self.backend == "rowwise":
                return "rowwise"
            if self.device.type != "cpu":
                return INVARIANT
            return NATIVE if native else "rowwise"
        if self.backend not in ("auto", FLASHINFER):
            return self.backend
        if native:
            return NATIVE
        if self.device.type == "cuda" and find_spec(FLASHINFER) is not None:
            import torch

            from arbor.kernels.attention.flashinfer_cascade import DTYPES, HEAD_DIMS

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
