"""Loading a model and its tokenizer by directory, Hub id or built-in name (`builtin:sapling`)."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from arbor.errors import ArborError, ModelError, UnknownName, UsageError
from arbor.model.adapters import check_adapter, merged
from arbor.model.bfloat16 import auto_dtype
from arbor.model.chat_template import named_templates
from arbor.model.gguf.config import complete_config
from arbor.model.gguf.header import instead_of_weights, is_gguf, read_gguf_header
from arbor.model.gguf.rope import divide_frequencies, set_rotary
from arbor.model.gguf.tokenizer import ending_ids, restore_tags, set_ends, split_as_told
from arbor.model.hub import cache_if_unreachable, offline_error
from arbor.model.quantized import check_quantized, check_whole, quantization_of
from arbor.model.sampling_params import Sampling
from arbor.model.stored_dtype import INDEX, WEIGHTS, stored_dtype
from arbor.support.environment import environment
from arbor.support.reason import reason_of
from arbor.support.shortage import is_out_of_memory
from arbor.support.stages import show

if TYPE_CHECKING:
    import torch

    from arbor.model.parallel.shards import Division

logger = logging.getLogger(__name__)

GGUF = ".gguf"
VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
GGUF_PACKAGES = ("gguf", "accelerate")

# Sampling in a GGUF file.
SAMPLING, SAMPLING_NAMES = "general.sampling.", ("temp", "top_p", "top_k", "min_p")
# Settings of a generation config that transformers applies to every next token and arbor does not,
# each with the value that changes nothing.
LEFT_OUT = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0,
    "sequence_bias": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "min_length": 0,
    "min_new_tokens": 0,
    "stop_strings": None,
    "watermarking_config": None,
}
# The same, of configs that sample.
LEFT_OUT_OF_SAMPLING = {
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}

Given = ParamSpec("Given")
Built = TypeVar("Built")

BUILTIN = {"sapling": Path(__file__).resolve().parent.parent / "sapling"}


_building = threading.RLock()


def one_at_a_time(build: Callable[Given, Built]) -> Callable[Given, Built]:
    """A function that builds a model, of which no other thread builds one meanwhile: transformers
    and accelerate change torch for the whole process while they do."""

    @wraps(build)
    def alone(*args: Given.args, **kwargs: Given.kwargs) -> Built:
        with _building:
            return build(*args, **kwargs)

    return alone


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """The place a model is loaded from.

    Attributes:
        name: as the user wrote it.
        path: the path or Hub id for transformers.
        revision: branch, tag or commit on the Hub; None = its main branch, and always None for a
            directory.
        trust_remote_code: whether Python files that come with the weights may run.
        gguf: a GGUF file there, which holds config, tokenizer and weights; None: files of
            transformers.
        adapter: a directory or Hub id of weights that are added to the model's; None: none.
    """

    name: str
    path: str
    revision: str | None = None
    trust_remote_code: bool = False
    gguf: str | None = None
    adapter: str | None = None

    @property
    def file(self) -> str:
        """A directory, a Hub id, or a GGUF file, with config, tokenizer and weights; empty for a
        ready model."""
        return self.path if self.gguf is None else f"{self.path}/{self.gguf}"

    @property
    def label(self) -> str:
        """Name and revision, for messages."""
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of transformers' loaders after the path, besides those of `read_once`.

        Trust is always passed: without it, transformers asks on the terminal.
        """
        version = {} if self.revision is None else {"revision": self.revision}
        return {**version, "trust_remote_code": self.trust_remote_code}


def locate_model(
    model: str | os.PathLike[str],
    revision: str | None = None,
    trust_remote_code: bool = False,
    adapter: str | os.PathLike[str] | None = None,
) -> ModelLocation:
    """Find a model without reading its weights.

    Args:
        model, revision, trust_remote_code, adapter: as in `ModelLocation`.

    Raises:
        ModelError: the directory does not exist, or has no config or weights; or what it holds
            needs a package that is not installed.
        UnknownName: an unknown ``builtin:`` model.
        UsageError: a revision of a directory.
    """
    found = _locate(os.fspath(model))
    if revision is not None and Path(found.path).is_dir():
        raise revision_error(revision, f"{found.name} is a directory")
    if adapter is not None:
        check_adapter(os.fspath(adapter))
    return dataclasses.replace(
        found,
        revision=revision,
        trust_remote_code=trust_remote_code,
        adapter=None if adapter is None else os.fspath(adapter),
    )


def revision_error(revision: str, what: str) -> UsageError:
    """The error for a revision where only one version exists."""
    return UsageError(
        "revision",
        f"--revision {revision}: {what}, and only a model of the Hub has revisions.",
        "Leave --revision out, or name a Hub id, as in Qwen/Qwen2.5-7B-Instruct.",
        revision=revision,
    )


def _locate(name: str) -> ModelLocation:
    if name.startswith("builtin:"):
        builtin = name.removeprefix("builtin:")
        if builtin not in BUILTIN:
            raise UnknownName("model", name, [f"builtin:{known}" for known in BUILTIN])
        return _directory(name, BUILTIN[builtin])
    if not name.strip():
        raise ModelError(
            "model-not-found",
            "the model's name is empty.",
            "Name a directory, a Hub id, or builtin:sapling.",
            model=name,
        )
    path = Path(name).expanduser()
    if path.is_dir():
        return _directory(name, path)
    packed = name.lower().endswith(GGUF)
    if (path.is_file() and (packed or is_gguf(path))) or (packed and _is_hub_file(name)):
        return _gguf_file(name, path)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1 or path.exists()
    if looks_local:
        what = "is a file, not a directory" if path.exists() else "no such directory"
        raise ModelError(
            "model-not-found",
            f"{what}: {name}. It is not a Hub id either (a Hub id looks like "
            "Qwen/Qwen2.5-7B-Instruct).",
            f"Local models found: {', '.join(_nearby(path)) or 'none'}. Built in: builtin:sapling.",
            model=name,
        )
    return ModelLocation(name, name)


def _is_hub_file(name: str) -> bool:
    """Whether a name is that of a file of a model of the Hub, OWNER/MODEL/FILE."""
    return name.count("/") == 2 and not name.startswith((".", "/", "~"))


def _gguf_file(name: str, path: Path) -> ModelLocation:
    """A file that holds config, tokenizer and weights.

    Raises:
        ModelError: it is damaged or cut off.
        UsageError: a package is missing that reads it.
    """
    missing = [each for each in GGUF_PACKAGES if find_spec(each) is None]
    if missing:
        raise UsageError(
            "extra-missing",
            f"{name}: transformers reads GGUF files with {' and '.join(missing)}.",
            "pip install 'arbor-search[gguf]'",
            model=name,
        )
    if path.is_file():
        read_gguf_header(path).check()
        return ModelLocation(name, str(path.absolute().parent), gguf=path.name)
    folder, file = name.rsplit("/", 1)
    return ModelLocation(name, folder, gguf=file)


def _directory(name: str, path: Path) -> ModelLocation:
    if not (path / "config.json").is_file():
        packed = sorted(path.glob(f"*{GGUF}"))
        raise ModelError(
            "model-incomplete",
            f"{name} has no config.json.",
            f"Name the file: {packed[0]}"
            if packed
            else "A model directory holds config.json, *.safetensors and a tokenizer.",
            model=name,
        )
    if not any(path.glob("*.safetensors")):
        pickles = sorted(p.name for p in path.glob("*.bin"))
        found = f" (found {pickles[0]}: convert it to safetensors)" if pickles else ""
        raise ModelError(
            "model-incomplete",
            f"{name} has config.json but no *.safetensors{found}.",
            "Copy the weights there.",
            model=name,
        )
    return ModelLocation(name, str(path.absolute()))  # a program may change its folder


def _nearby(path: Path) -> list[str]:
    """Model directories next to a path."""
    parent = path.parent if path.parent.is_dir() else Path()
    try:
        return sorted(str(p.parent) for p in parent.glob("*/config.json"))[:5]
    except OSError:
        return []


def load_config(source: ModelLocation) -> Any:
    """The model's config.

    Raises:
        ModelError: unreadable, or a model_type unknown to transformers.
    """
    from transformers import AutoConfig

    try:
        with read_once(source) as (path, packed):
            config: Any = AutoConfig.from_pretrained(path, **packed, **source.loading)
        if source.gguf is not None:
            header = read_gguf_header(gguf_path(source))
            complete_config(config, header)
            set_rotary(config, header)
    except ArborError:
        raise
    except Exception as error:  # transformers checks little of what a file holds
        if not _is_the_files(source, error, OSError, ValueError, KeyError):
            raise
        raise _unreadable(source, error) from error
    config.name_or_path = source.path
    return config


@contextmanager
def read_once(
    source: ModelLocation, on_tensor: Callable[[int, int], None] | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """What transformers' loaders get of the place of a model; a GGUF file is parsed once.

    Args:
        source: the model.
        on_tensor: as in `header_given`.

    Yields:
        The path, and the arguments that name a file there.

    Raises:
        ModelError: a damaged GGUF file.
        OSError: one of the Hub that cannot be downloaded.
    """
    with ExitStack() as lasting:
        if not Path(source.path).is_dir():
            lasting.enter_context(cache_if_unreachable())
        if source.gguf is None:
            yield source.path, {}
            return
        from arbor.model.gguf.conversion import header_given

        header = read_gguf_header(gguf_path(source))
        header.check()
        folder, file = lasting.enter_context(header_given(header, on_tensor))
        yield folder, {"gguf_file": file}


def settled_dtype(source: ModelLocation, dtype: str, device: str) -> str:
    """The dtype to read a model in: ``auto`` of a GGUF file depends on the device too, and where a
    config states no dtype, on the weights.

    Args:
        source: the model.
        dtype: as the user wrote it.
        device: by name, or ``auto``.

    Raises:
        ModelError: a damaged GGUF file.
    """
    if dtype != "auto" or not source.path:  # a ready model has its own
        return dtype
    if source.gguf is None:
        return stored_dtype(source.path, source.revision) or dtype
    try:
        return auto_dtype(read_gguf_header(gguf_path(source)), device)
    except (OSError, ValueError) as error:
        raise _unreadable(source, error) from error


def gguf_path(source: ModelLocation) -> Path:
    """A GGUF file on this machine; that of a model of the Hub is downloaded if need be."""
    assert source.gguf is not None, "it names a file"
    if Path(source.path).is_dir():
        return Path(source.path) / source.gguf
    from transformers.utils.hub import cached_file

    with cache_if_unreachable():
        return Path(str(cached_file(source.path, source.gguf, revision=source.revision)))


def cached_commit(source: ModelLocation) -> str | None:
    """The commit of a Hub model's cached config; None for a directory, or before it is read."""
    if Path(source.path).is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.path, "config.json", revision=source.revision)
    return Path(found).parent.name if isinstance(found, str) else None


def load_tokenizer(source: ModelLocation) -> Any:
    """The model's tokenizer.

    Raises:
        ModelError: no readable tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        with read_once(source) as (path, packed):
            tokenizer: Any = AutoTokenizer.from_pretrained(path, **packed, **source.loading)
        if source.gguf is not None:
            header = read_gguf_header(gguf_path(source))
            split_as_told(tokenizer, header)
            restore_tags(tokenizer, header, ending_ids(header))
            tokenizer.chat_template = tokenizer.chat_template or named_templates(header)
    except ArborError:
        raise
    except Exception as error:
        if not _is_the_files(source, error, OSError, ValueError, KeyError, TypeError):
            raise
        folder = Path(source.path)
        if folder.is_dir() and not needs_remote_code(error):
            none = source.gguf is None and not any(any(folder.glob(x)) for x in VOCABULARIES)
            reason = "no file there has a vocabulary" if none else reason_of(error)
            raise _no_tokenizer(source, reason) from error
        raise _unreadable(source, error) from error
    tokenizer.name_or_path = source.file
    special = set(tokenizer.all_special_tokens)
    if len(tokenizer) <= len(special) and set(tokenizer.get_vocab()) <= special:
        # what transformers builds without files, for some architectures
        raise _no_tokenizer(source, "its vocabulary is empty")
    longest = tokenizer.model_max_length  # compared with every text's length
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise _no_tokenizer(source, f"model_max_length is {longest!r:.40}, not a number")
    return tokenizer


def _no_tokenizer(source: ModelLocation, reason: str) -> ModelError:
    return ModelError(
        "model-incomplete",
        f"{source.name} has no readable tokenizer ({reason}).",
        "Copy tokenizer.json and tokenizer_config.json there."
        if source.gguf is None
        else "Take another conversion of the model.",
        model=source.name,
    )


@one_at_a_time
def load_model(
    source: ModelLocation,
    dtype: torch.dtype,
    device: torch.device,
    auto: str = "AutoModelForCausalLM",
    division: Division | None = None,
) -> Any:
    """The decoder with its weights.

    Args:
        source: the model.
        dtype, device: of its weights.
        auto: the class of transformers that builds it; ``AutoModel`` has no head.
        division: which part of safetensors this process reads, as one of several; None: all. A
            GGUF file is mapped whole, in host memory.

    For a GPU, transformers copies each tensor to the device as it is read, if accelerate is
    installed; without it the whole model passes through host memory.

    Raises:
        ModelError: weights that cannot be read or do not fit the config.
        OutOfMemory: they do not fit into memory.
    """
    import torch
    from transformers.utils.import_utils import is_accelerate_available

    from arbor.memory.out_of_memory import weights_too_large

    config = load_config(source)
    check_quantized(config, source.name, device.type)
    later = division is not None and source.gguf is not None and device.type != "cpu"
    if later:  # `put_on` brings it there
        device = torch.device("cpu")  # no GPU is given what it does not keep
    direct = device.type != "cpu" and is_accelerate_available()
    divided = division is not None
    if division is not None and direct != torch.cuda.is_available():
        division = None  # transformers would divide it among the GPUs; it is read whole
    try:
        model = None
        if source.gguf is not None:
            model = _blocks_of_gguf(source, config, dtype, device, linear_only=later)
        missing: Iterable[str] = ()
        unread: Iterable[str] = ()
        if model is None:
            place = device if direct else None
            model, missing, unread = _by_transformers(source, config, dtype, place, auto, division)
    except ArborError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise weights_too_large(device if direct else torch.device("cpu"), None) from error
        torn = type(error).__name__ == "SafetensorError"
        if not torn and not _is_the_files(
            source, error, OSError, ValueError, KeyError, TypeError, RuntimeError
        ):
            raise
        raise _unreadable(source, error, quantization_of(config)) from error
    if quantization_of(config) is None:
        check_whole(unread, source.name)
    if source.gguf is not None:
        header = read_gguf_header(gguf_path(source))
        set_ends(model, header)
        divide_frequencies(model, header)
    missing = sorted(missing)
    if missing:
        lost = "1 tensor" if len(missing) == 1 else f"{len(missing)} tensors, among them"
        raise ModelError(
            "model-incomplete",
            f"{source.name}: the weights lack {lost} {missing[0]}.",
            _complete_weights(source)
            if source.gguf is None
            else "Take another conversion of the model.",
            model=source.name,
        )
    if source.adapter is not None:
        method = quantization_of(model.config)
        if method not in (None, "gguf"):
            raise ModelError(
                "adapter-unreadable",
                f"{source.name}: an adapter is not merged into weights quantized by {method}.",
                "Name the model that is not quantized, or leave adapter out.",
                model=source.name,
            )
        model = merged(model, source.adapter)
    if divided or {each.device.type for each in model.parameters()} == {device.type}:
        return model  # quantized layers refuse to be moved
    weights = sum(each.nbytes for each in model.parameters())
    try:
        return model.to(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise weights_too_large(device, weights) from error


def _complete_weights(source: ModelLocation) -> str:
    """What to do about a directory whose safetensors lack tensors, or their index."""
    folder = Path(source.path)
    shards = {each.name for each in folder.glob("model-*-of-*.safetensors")}
    if shards and not (folder / WEIGHTS).is_file():
        index = folder / INDEX
        if not index.is_file():
            return f"Copy {INDEX} there, which says what each of the {len(shards)} files holds."
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        if unnamed := sorted(shards.difference(named)):
            return f"Copy {INDEX} there again: it does not name {unnamed[0]}."
    return "Copy every *.safetensors file there."


def _blocks_of_gguf(
    source: ModelLocation,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    linear_only: bool,
) -> Any | None:
    """The model of a GGUF file, its matrices in the file's blocks on a CPU; None for an
    architecture that only transformers converts."""
    from arbor.model.gguf.weights import read_model

    header = read_gguf_header(gguf_path(source))
    dense = source.adapter is not None  # added to numbers
    model = read_model(
        *(header, config, dtype, device),
        dense=dense,
        linear_only=linear_only,
        on_tensor=_shown(source),
    )
    if model is None:
        kind = header.get("general.architecture")
        logger.info("%s: weights of '%s' become dense", source.label, kind)
    return model


def _by_transformers(
    source: ModelLocation,
    config: Any,
    dtype: torch.dtype,
    device: torch.device | None,
    auto: str,
    division: Division | None = None,
) -> tuple[Any, Iterable[str], Iterable[str]]:
    """A model as transformers loads it, names of the weights that it did not find, and names of
    those it has no place for.

    Args:
        source, config, dtype, auto, division: as in `load_model`.
        device: to read weights to; None: host memory.
    """
    import transformers

    placement: dict[str, Any] = {} if device is None else {"device_map": {"": device}}
    number: dict[str, str] = {}
    if source.gguf is not None:
        placement["config"] = config
        placement["quantization_config"] = transformers.GgufConfig(dequantize=True)
    elif division is not None:
        from transformers.distributed import tensor_parallel
        from transformers.distributed.configuration_utils import DistributedConfig

        # transformers 5.17 has no style for what is whole, and reads so what no plan names
        styles = vars(tensor_parallel)["ALL_PARALLEL_STYLES"]
        plan = {name: style for name, style in division.read.items() if style in styles}
        placement = {"distributed_config": DistributedConfig(tp_size=division.count, tp_plan=plan)}
        number = {} if device is None else {"LOCAL_RANK": str(device.index or 0)}  # of the GPU
    reading = read_once(source, _shown(source))
    with _no_progress_bar(), environment(number), reading as (path, packed):
        model, report = getattr(transformers, auto).from_pretrained(
            path,
            dtype=dtype,
            output_loading_info=True,
            **packed,
            **placement,
            **source.loading,
        )
    return model, report.get("missing_keys") or (), report.get("unexpected_keys") or ()


def _shown(source: ModelLocation) -> Callable[[int, int], None]:
    """Shows how many tensors are read, and of how many."""

    def shown(done: int, tensors: int) -> None:
        show(f"loading {source.label}: tensor {done + 1:,} of {tensors:,}")

    return shown


def weight_files(source: ModelLocation) -> list[Path]:
    """The files of a model's weights; those of a model of the Hub are downloaded.

    Raises:
        ModelError: they cannot be downloaded.
    """
    if source.gguf is not None:
        raise ModelError(
            "model-gguf",
            f"{source.name}: single tensors of a GGUF file are not read.",
            "Take the model's safetensors.",
            model=source.name,
        )
    if Path(source.path).is_dir():
        return sorted(Path(source.path).glob("*.safetensors"))
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            source.path, revision=source.revision, allow_patterns=["*.safetensors"]
        )
    except (OSError, ValueError) as error:
        raise _unreadable(source, error) from error
    return sorted(Path(folder).glob("*.safetensors"))


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide transformers' bar; arbor shows the stages of loading itself (`stages`)."""
    from transformers.utils import logging as loading_bars

    shown = loading_bars.is_progress_bar_enabled()
    loading_bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            loading_bars.enable_progress_bar()


def needs_remote_code(error: Exception) -> bool:
    """Whether transformers refused to run remote code."""
    return isinstance(error, ValueError) and "trust_remote_code=True" in str(error)


def remote_code_error(name: str) -> ModelError:
    """The error for a model that needs remote code without permission."""
    return ModelError(
        "remote-code",
        f"{name} needs Python code that comes with its weights, and that code may do anything.",
        "Read it; if you trust it, add --trust-remote-code.",
        model=name,
    )


def _is_the_files(source: ModelLocation, error: Exception, *kinds: type[Exception]) -> bool:
    """Whether an error of reading is the files' and not arbor's: any error, for a directory."""
    return isinstance(error, kinds) or (
        Path(source.path).is_dir() and not isinstance(error, MemoryError)
    )


def _unreadable(source: ModelLocation, error: Exception, method: str | None = None) -> ModelError:
    """The error for files that cannot be read; `method` quantized their weights, by the config."""
    if needs_remote_code(error):
        return remote_code_error(source.label)
    if Path(source.path).is_dir():
        reason = reason_of(error)
        if "ignore_mismatched_sizes" in str(error):
            said = f"those quantized by {method} have" if method else "its settings say"
            reason = f"weights have other shapes than {said}."
        for path in sorted(Path(source.path).glob("*.safetensors") if source.gguf is None else ()):
            with path.open("rb") as file:
                if found := instead_of_weights(file.read(64)):
                    reason = f"{path.name}: {found}."
        return ModelError(
            "model-incomplete",
            f"{source.name} cannot be read: {reason}",
            _complete_weights(source) if "no file named" in str(error) else "",
            model=source.name,
        )
    instead = "name a directory or a GGUF file, or use --model builtin:sapling"
    return offline_error(source.label, source.name, instead) or ModelError(
        "model-not-found",
        f"{source.label} is neither a directory nor a model the Hub gave us: {reason_of(error)}",
        "A Hub id looks like Qwen/Qwen2.5-7B-Instruct.",
        model=source.name,
    )


def load_generation_config(source: ModelLocation) -> Any:
    """The model's generation config; None if it has none, or one that is not JSON.

    Raises:
        ModelError: it is JSON of another form, with which transformers loads no weights either.
    """
    from transformers import GenerationConfig

    if source.gguf is not None:
        return None  # one next to the file may be another model's
    try:
        return GenerationConfig.from_pretrained(source.path, revision=source.revision or "main")
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            "model-incomplete",
            f"generation_config.json of {source.name} cannot be read: {reason_of(error)}",
            "Correct it, or delete it: a model needs none.",
            model=source.name,
        ) from error
    except OSError as error:
        if has_generation_config(source):
            reason = reason_of(error)
            logger.warning("generation_config.json of %s is left out: %s", source.name, reason)
        return None


def has_generation_config(source: ModelLocation) -> bool:
    """Whether a model directory has a generation config."""
    return source.gguf is None and (Path(source.path) / "generation_config.json").exists()


def sampling_defaults(generation: Any) -> Sampling:
    """Sampling by a model's generation config; the defaults of `Sampling` without one.

    Raises:
        ModelError: invalid values.
    """
    if generation is None or not getattr(generation, "do_sample", False):
        return Sampling()

    def configured(name: str, default: float) -> Any:
        value = getattr(generation, name, None)
        return default if value is None else value

    try:
        return Sampling(
            temperature=float(configured("temperature", 1.0)),
            top_p=float(configured("top_p", 1.0)),
            top_k=int(configured("top_k", 0)),
            min_p=float(configured("min_p", 0.0)),
        )
    except (TypeError, ValueError, UsageError) as error:
        raise ModelError(
            "model-incomplete",
            f"the generation config has invalid sampling settings: {reason_of(error)}",
            "Correct temperature, top_p, top_k and min_p there.",
        ) from error


def sampling_in_gguf(source: ModelLocation) -> Sampling:
    """Sampling as a GGUF file sets it; the defaults of `Sampling` where it sets none.

    Raises:
        ModelError: invalid values.
    """
    header = read_gguf_header(gguf_path(source))
    found = {each: header.get(SAMPLING + each) for each in SAMPLING_NAMES}
    own = {
        "temperature" if name == "temp" else name: max(0.0, float(f"{value:.7g}"))  # of a float32
        for name, value in found.items()
        if isinstance(value, int | float)
    }
    return sampling_defaults(SimpleNamespace(do_sample=True, **own) if own else None)


def left_out(generation: Any) -> tuple[str, ...]:
    """Names of the settings of a generation config that change what transformers generates, and not
    what arbor does."""
    sampled = LEFT_OUT_OF_SAMPLING if getattr(generation, "do_sample", False) else {}
    return tuple(
        name
        for name, neutral in {**LEFT_OUT, **sampled}.items()
        if getattr(generation, name, None) not in (None, neutral, [], {}, "")
    )


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a sequence: the generation config's, or the tokenizer's.

    Raises:
        ModelError: the generation config's are not whole numbers.
    """
    config = getattr(model, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    several = tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    if any(isinstance(each, bool) or not isinstance(each, Integral) for each in several):
        raise ModelError(
            "model-incomplete",
            f"eos_token_id of the generation config is {ids!r:.40}, not the id of a token.",
            "Correct it in generation_config.json: a whole number, or a list of them.",
        )
    return tuple(int(each) for each in several)
