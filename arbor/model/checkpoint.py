"""Checkpoint: the model a solver runs, read in two steps: config and tokenizer, then weights."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from arbor.errors import ModelError, UsageError
from arbor.model.bfloat16 import is_gpu
from arbor.model.description_cache import kept_description
from arbor.model.loading import (
    ModelLocation,
    load_config,
    locate_model,
    revision_error,
    settled_dtype,
)
from arbor.model.model_info import Description, Files, ModelInfo
from arbor.model.names import BYTES_OF, INT8, check_device, check_dtype, check_int8_weights
from arbor.model.parallel.devices import devices_of
from arbor.model.parallel.shards import cannot, division_of
from arbor.model.placement import (
    FLASHINFER,
    INVARIANT,
    NATIVE,
    TRITON,
    check_backend,
    check_int8,
    current,
    device_of_model,
    flashinfer_computes,
    resolve_backend,
    resolve_device,
    runs_native,
    triton_computes,
)
from arbor.support.garbage import no_collection
from arbor.support.read_write_lock import ReadWriteLock
from arbor.support.setting import setting, settings_of
from arbor.support.stages import stage_of

if TYPE_CHECKING:
    import torch

    from arbor.model.int8_weights import WeightRounding
    from arbor.model.parallel.followers import Followers
    from arbor.model.parallel.ranks import Ranks
    from arbor.model.runner import ModelRunner
    from arbor.model.weights import Weights

TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by it in each process


def _model(given: Any) -> Any:
    """A name or a path, or a ready model."""
    if isinstance(given, str | os.PathLike) or hasattr(given, "parameters"):
        return given
    message = f"model = {given!r:.60}: it must be text, or a ready model."
    raise UsageError("setting-type", message, setting="model")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        model: ``builtin:sapling``, a directory, a Hub id, or a ready `PreTrainedModel` (then
            `tokenizer` too). `Solver.load` changes a ready model in place: its attention becomes
            arbor's, and on a CPU the weights of its linear layers are packed. It can then neither
            generate by itself nor be saved.
        revision: branch, tag or commit of a model of the Hub; by default its main branch.
        trust_remote_code: run the Python code in a model's repository; never part of a
            configuration, so that nobody trusts by accident.
    """

    HEADING = "Model"

    model: Any = setting(
        "builtin:sapling",
        "The built-in model, a directory, or a Hugging Face id.",
        shown="short",
        metavar="NAME|DIR",
        read=_model,
        recorded="always",
    )
    revision: str | None = setting(
        None,
        "Branch, tag or commit on the Hub; default: the main branch.",
        metavar="NAME",
        recorded="always",
    )
    trust_remote_code: bool = setting(
        False, "Run Python code shipped with the model; only if you have read it.", recorded="never"
    )


@dataclass(frozen=True, kw_only=True)
class ModelSettings(ModelSource):
    """Which model runs, and how.

    Attributes:
        tokenizer: for a ready model.
        adapter: LoRA weights of peft, a directory or a Hub id, merged into the model's when it is
            loaded; needs ``arbor-search[adapters]``.
        dtype, device: ``auto`` is the dtype of the weights, and CUDA where there is a GPU; a ready
            model keeps its own.
        kv_dtype: ``int8`` keeps K and V in 8 bits, rounded once when a token is written: lossy, and
            up to nearly four times the tokens in the same bytes (docs/cpu.md); on a GPU with the
            backend ``triton`` alone. ``auto`` is the model's dtype.
        weights: ``int8`` keeps the weights of linear layers in 8 bits with a scale for each 32,
            rounded once when the model is loaded: lossy (CPU only; docs/cpu.md). ``auto``
            keeps them as they are.
        backend: what computes attention: ``auto``, ``native`` (CPU), ``torch``, ``flashinfer``
            (CUDA), ``rowwise``, ``invariant`` and ``triton`` (CUDA), a plugin. ``auto`` is the
            native kernels on a CPU and FlashInfer on CUDA, where they are installed and compute
            the model, else torch; if `deterministic`, ``invariant`` on CUDA, and ``rowwise`` on a
            CPU without the native kernels.
        cuda_graphs: on a GPU with FlashInfer or ``triton``, decode steps are captured and replayed
            where that gives the same logits up to rounding.
        deterministic: results do not depend on the rest of the batch, to the last bit, or the model
            is refused (no mixtures of experts). The native kernels of a CPU need no request for
            that; elsewhere it is slower; see docs/budget.md.
        tp: processes that hold the model together, each some of its heads, on a GPU each or on a
            CPU; the others are begun by this one (docs/compatibility.md).
    """

    HEADING = "Model"

    tokenizer: Any = setting(
        None, "Of a ready model.", heading="Search", shown="code", recorded="never"
    )
    adapter: str | os.PathLike[str] | None = setting(
        None,
        "LoRA weights of peft, a directory or Hub id, merged when it loads.",
        shown="set",
        metavar="DIR",
    )
    dtype: str = setting(
        "auto",
        "Data type; auto: that of the weights.",
        metavar="NAME",
        read=check_dtype,
        recorded="always",
    )
    kv_dtype: Literal["auto", "int8"] = setting(
        "auto",
        "Data type of the KV; int8: 8 bits with scales, lossy, on a GPU with --backend triton.",
        shown="set",
    )
    weights: Literal["auto", "int8"] = setting(
        "auto", "Weights of linear layers; int8: 8 bits with scales, lossy, CPU only.", shown="set"
    )
    device: str = setting(
        "auto",
        "cpu or cuda; auto: cuda where available.",
        metavar="NAME",
        read=check_device,
        recorded="never",
    )
    backend: str = setting(
        "auto",
        "Attention kernels: auto, native, flashinfer, triton, torch, rowwise or invariant.",
        metavar="NAME",
        read=check_backend,
        recorded="always",
        names="backend",
    )
    cuda_graphs: bool = setting(
        True, "Capture and replay decode steps (CUDA with FlashInfer).", shown="set"
    )
    deterministic: bool = setting(
        False,
        "Require bitwise equal results for any batch (no mixture of experts).",
        heading="Sampling",
        recorded="always",
    )
    tp: int = setting(
        1,
        "Processes that hold the model together, on a GPU each or on a CPU.",
        metavar="N",
        least=1,
        recorded="never",
    )


class Checkpoint:
    """A model on disk, of the Hub or passed ready, read once for all threads.

    Args:
        settings: which model, and how it runs.
        follows: the ranks of which this process is one, and not the first; None: it is the first,
            or alone.

    Attributes:
        use: read while searches are in progress, written to replace weights.

    Raises:
        UsageError: invalid settings; nothing was read.
        ModelError: the model does not exist.
    """

    def __init__(self, settings: ModelSettings, follows: Ranks | None = None) -> None:
        self.tp, self._devices = settings.tp, [settings.device]
        if self.tp > 1 and follows is None:
            self._devices = _devices_of_ranks(settings)
        model, device, backend = settings.model, self._devices[0], settings.backend
        self.kv_dtype = settings.kv_dtype
        if self.kv_dtype == INT8:
            check_int8(backend, device, settings.deterministic)
        self.weights = settings.weights
        if self.weights == INT8:
            check_int8_weights(device)
        self._given = None if isinstance(model, str | os.PathLike) else model
        self._tokenizer = settings.tokenizer
        self.dtype = settings.dtype
        self.asked_device = device
        self._device: torch.device | None = None  # resolved late, since that imports torch
        if self._given is not None:
            self._device = device_of_model(model, self.dtype, device)
        elif device.startswith("cuda"):
            self._device = resolve_device(device)
        self.deterministic = settings.deterministic
        self.cuda_graphs = settings.cuda_graphs
        self.backend = backend
        if self.deterministic or backend in (FLASHINFER, INVARIANT, NATIVE, TRITON):
            self.backend = resolve_backend(backend, self.device, self.deterministic)
        revision, adapter = settings.revision, settings.adapter
        self.source = (
            locate_model(model, revision, settings.trust_remote_code, adapter)
            if self._given is None
            else ModelLocation(getattr(model, "name_or_path", "") or type(model).__name__, "")
        )
        if self._given is not None and self._tokenizer is None:
            raise UsageError("tokenizer", "a ready model needs its tokenizer.", "Pass tokenizer=….")
        if self._given is not None and revision is not None:
            raise revision_error(revision, "the model is loaded already")
        if self._given is not None and adapter is not None:
            raise UsageError(
                "adapter", "the model is loaded already.", "Merge the adapter into it, with peft."
            )
        self._follows = follows
        self._followers: Followers | None = None
        self._settings = {name: getattr(settings, name) for name in settings_of(ModelSettings)}
        self._description: Description | None = None  # of an earlier process
        self._files: Files | None = None
        self._weights: Weights | None = None
        self._updated: Any = None  # the model with new weights
        self._digests: dict[str, str] = {}  # of new weights, by their names
        self.use = ReadWriteLock()
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
        weights = self._weights  # read once, here and below: `close` may take it away
        return None if weights is None else weights.rounding

    def close(self) -> None:
        """Drop config, tokenizer and weights; a ready model keeps those it has.

        Searches in progress still have theirs, and other processes that hold them with this one
        end with the last of those searches.
        """
        self._description = self._files = self._weights = None
        if self._given is None:
            self._updated, self._digests = None, {}
        followers, self._followers = self._followers, None
        if followers is not None:
            self.use.when_unread(followers.close)

    def read(self) -> Description:
        """The description of the model, read once; without torch where an earlier process kept it.

        Raises:
            ModelError: unreadable.
        """
        with self._reading:
            known = self._files or self._description
            if known is not None:
                return known
            cheap = "torch" not in sys.modules or self.source.gguf is not None
            light = cheap and self._given is None and self._tokenizer is None
            if light:
                known = kept_description(self.source, self._settled_dtype())
                if known is not None:
                    self._description = known = replace(known, info=self._as_kept(known.info))
            return known or self._read(keep=light)

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
            weights = self._weights
            if weights is None:
                files = self.read() if self.device.type == "cpu" else self.read_files()
                if not files.info.supported:
                    reason, hint = files.info.reason, "See 'arbor info MODEL'."
                    raise ModelError("arch-unsupported", reason, hint)
                self._weights = weights = self._load_together(files)
            return weights

    def has(self, runner: ModelRunner) -> bool:
        """Whether a runner is the one that `load` gives; loads nothing."""
        weights = self._weights
        return weights is not None and weights.runner is runner

    @property
    def updated(self) -> str | None:
        """A digest of the weights that `update` gave; None: all are the model's own."""
        digests = self._digests
        if not digests:
            return None
        named = "".join(f"{name} {each}\n" for name, each in sorted(digests.items()))
        return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()

    def update(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Replace weights, and prepare the model anew; the caller writes (`use`).

        Raises:
            UsageError: a weight that does not fit, or weights in 8 bits; nothing has changed.
            ModelError, OutOfMemory: as `load`; the former weights are back.
        """
        if self.weights == INT8:
            raise UsageError(
                "weights",
                f"weights={INT8} keeps no layer that new weights could replace.",
                "Leave weights out, or save the model and name the directory.",
            )
        model = self.load().runner.model
        from arbor.model.new_weights import NewWeights

        with stage_of(f"updating {self.source.label}"):
            new = NewWeights(model, weights)
            with self._loading:
                self._weights = None
                self._updated = model
                former, self._digests = self._digests, self._digests | new.digests
                new.put()
        try:
            self.load()
        except BaseException:
            with self._loading:
                new.put()
                self._digests = former
            raise

    def _load_together(self, files: Description) -> Weights:
        """The weights, those of this rank where several hold the model."""
        if self.tp == 1 or self._follows is not None:
            return self._load(files, self._follows)
        import torch

        from arbor.model.parallel.followers import Followers

        with stage_of(f"beginning {self.tp} processes"):
            followers = Followers(self._settings, self._devices, torch.get_num_threads())
        try:
            with followers.loading():
                weights = self._load(files, followers.ranks)
        except BaseException:
            followers.close()
            raise
        self._followers = weights.runner.followers = followers
        return weights

    def _load(self, files: Description, ranks: Ranks | None) -> Weights:
        with stage_of(f"loading {self.source.label}"), no_collection():
            from arbor.model.ready import put_back
            from arbor.model.weights import load_weights

            model = self._updated or self._ready_model(files)
            with nullcontext() if model is None else put_back(model), current(self.device):
                return load_weights(
                    self.source,
                    model,
                    files,
                    device=self.device,
                    backend=self.backend_name(files.info),
                    required=self.backend in (FLASHINFER, TRITON) or self.kv_dtype == INT8,
                    deterministic=self.deterministic,
                    cuda_graphs=self.cuda_graphs,
                    int8_kv=self.kv_dtype == INT8,
                    int8_weights=self.weights == INT8,
                    ranks=ranks,
                )

    def _ready_model(self, files: Description) -> Any:
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
        self._files = files = replace(files, info=self._as_kept(files.info))
        return files

    def _settled_dtype(self) -> str:
        """The dtype to read the model in, as in `resolve_dtype`."""
        return settled_dtype(self.source, self.dtype, self.asked_device)

    def _as_kept(self, info: ModelInfo) -> ModelInfo:
        """The model with weights and KV as they are kept here."""
        info = replace(info, weights=self.weights)
        on_gpu = is_gpu(self.asked_device)
        if self.source.gguf is not None and (self.source.adapter is not None or on_gpu):
            info = info.with_dense_weights()
        if self.tp > 1 and info.supported:
            division = division_of(load_config(self.source), self.tp)
            mine, whole = division.kv_heads_each, division.kv_heads
            info = replace(
                info,
                kv_bytes_per_token=info.kv_bytes_per_token * mine // whole,
                kv_bytes_int8=info.kv_bytes_int8 * mine // whole,
            )
            if on_gpu:  # on a CPU a file may be mapped by all
                info = replace(info, weights_bytes=division.numbers * BYTES_OF[info.dtype])
        return info.with_int8_kv() if self.kv_dtype == INT8 else info

    def backend_name(self, info: ModelInfo) -> str:
        """The attention backend; ``auto`` is triton or FlashInfer on CUDA and native on a CPU, else
        torch.

        Each where it is installed and computes the model; deterministic: native or rowwise on a
        CPU, ``invariant`` on CUDA. Once the weights are loaded, the one in use.

        Raises:
            UsageError: the backend that was requested does not compute this model, or none reads
                8-bit KV on this device.
        """
        if (weights := self._weights) is not None:
            return weights.backend
        if self.kv_dtype == INT8:
            check_int8(self.backend, str(self.device), self.deterministic, info.head_dims)
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
        if self.backend == TRITON and info.dtype == "float64":
            raise UsageError(
                "backend",
                "--backend triton has no kernels for float64.",
                "Use --backend torch, or --dtype float32.",
            )
        if self.backend not in ("auto", FLASHINFER):
            return self.backend
        if native:
            return NATIVE
        if self.device.type == "cuda":
            if self.backend == "auto" and (triton_computes(info) or self.kv_dtype == INT8):
                return TRITON
            if flashinfer_computes(info):
                return FLASHINFER
            if self.backend == FLASHINFER:
                heads = " and ".join(map(str, info.head_dims))
                raise UsageError(
                    "backend",
                    f"--backend flashinfer: no kernels for {info.dtype} and heads of {heads}.",
                    "Use --backend torch, or --dtype bfloat16 if it is the dtype.",
                )
        return "torch"


def _devices_of_ranks(settings: ModelSettings) -> list[str]:
    """The device of each rank, by name; nothing is read.

    Args:
        settings: with `tp` above 1.

    Raises:
        UsageError: something does not run on several ranks, or there are too few GPUs; names the
            setting, and what to give instead.
    """
    ready = not isinstance(settings.model, str | os.PathLike)
    refused = {
        "a ready model": (ready, "a directory or Hub id"),
        "adapter": (settings.adapter is not None, "a model that it is merged into"),
    }
    for what, (given, instead) in refused.items():
        if given:
            raise cannot(settings.tp, what, instead)
    if TORCHRUN in os.environ:
        raise UsageError(
            "tp",
            f"--tp {settings.tp}: torchrun began this process and others, and arbor begins its own.",
            "Run the same with python, on one machine.",
            tp=settings.tp,
        )
    return devices_of(settings.device, settings.tp)
