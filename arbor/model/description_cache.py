"""Descriptions of models kept as files, so that a plan imports neither torch nor transformers.

A description is kept for a model directory whose tokenizer is ``tokenizer.json`` as it is, and used
only while everything that it was made from is the same: the directory's files, the dtype, and the
versions of Python's packages and of this one's modules. Any other file is ignored and replaced.

Descriptions are in the cache folder (`arbor.support.cache_dir`); that of the built-in model is
shipped with it, in `SHIPPED`, which ``scripts/describe_sapling.py`` writes.

Never kept: models of the Hub, whose files may change with the cache; models whose Python code is
trusted, which may do anything; tokenizers with a chat template, which transformers renders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from arbor._version import __version__
from arbor.errors import ArborError
from arbor.model.files import Description
from arbor.model.loading import BUILTIN, ModelLocation, load_tokenizer
from arbor.model.model_info import ModelInfo
from arbor.model.sampling_params import Sampling
from arbor.support.atomic_write import write_atomically
from arbor.support.cache_dir import description_file

SCHEMA = "arbor.description/1"
SHIPPED = "description.json"
TOKENIZER = "tokenizer.json"
PACKAGES = ("tokenizers", "torch", "transformers")
# files of a model's directory that hold none of its settings
WEIGHTS = (".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors")
OTHER_FILES = (
    *(SHIPPED, "exit.json", "msve.json"),
    *("README.md", "LICENSE", ".gitattributes", ".gitignore"),
)
TEMPLATES = "additional_chat_templates"  # the only folder that transformers reads
# what a tokenizer's class may change between text and ids
STEPS = (
    *("encode", "_encode_plus", "_convert_encoding", "set_truncation_and_padding"),
    *("decode", "_decode", "__len__"),
)
LARGE_BYTES = 64 << 20  # larger files are identified by their size and time of change

Record = dict[str, Any]


class PlainTokenizer:
    """``tokenizer.json`` as it is: the ids and texts of the model's Hugging Face tokenizer.

    Args:
        path: of the file.
    """

    chat_template = None

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def __len__(self) -> int:
        """Number of token ids, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def serialized(self) -> str:
        """Everything that decides the ids, as JSON."""
        return str(self._tokenizer.to_str())


def kept_description(source: ModelLocation, dtype: str) -> Description | None:
    """The description of a model from a file; None if there is none that is still true.

    Args:
        source: the model.
        dtype: as the user wrote it.
    """
    folder = Path(source.path)
    if source.trust_remote_code or source.gguf is not None or not folder.is_dir():
        return None
    try:
        record = _shipped(source, dtype) or _cached(source, dtype)
        if record is None:
            return None
        info = record["info"] | {"head_dims": tuple(record["info"]["head_dims"])}
        return Description(
            PlainTokenizer(folder / TOKENIZER),
            ModelInfo(id=source.name, revision=None, **info),
            Sampling(**record["sampling"]),
        )
    except Exception:  # whatever a damaged file holds: the model is then read as without one
        return None


def light_tokenizer(source: ModelLocation) -> Any:
    """A model's tokenizer: `PlainTokenizer` where a description is kept, else transformers'.

    Raises:
        ModelError: no readable tokenizer.
    """
    known = kept_description(source, "auto")
    return load_tokenizer(source) if known is None else known.tokenizer


def keep_description(source: ModelLocation, dtype: str, config: Any, files: Description) -> None:
    """Writes the description of a model that was read, if it may be kept; a failure is ignored.

    Args:
        source, dtype: as in `kept_description`.
        config: the model's config.
        files: what was read.
    """
    with contextlib.suppress(OSError, ArborError, metadata.PackageNotFoundError):
        if not _may_be_kept(source, config, files):
            return
        path = description_file(_place(source, dtype))
        record = _sealed(_identity(source, dtype), record_of(files))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(record, indent=1) + "\n")


def record_of(files: Description) -> Record:
    """A description as JSON; id and revision are not the model's."""
    info = {k: v for k, v in files.info.to_dict().items() if k not in ("id", "revision")}
    return {"info": info, "sampling": dataclasses.asdict(files.sampling)}


def shipped_text(folder: Path, files: Description) -> str:
    """The file `SHIPPED` of a built-in model."""
    record = _sealed(files_digest(folder), record_of(files))
    return json.dumps(record, indent=1) + "\n"


def files_digest(folder: Path) -> str:
    """A digest of the files of a model's directory that may hold settings of it."""
    files = sorted([*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*")])
    settings = [each for each in files if each.suffix not in WEIGHTS]
    return _digest_of(folder, [each for each in settings if each.name not in OTHER_FILES])


def weights_digest(folder: Path) -> str:
    """A digest of the weights in a model's directory."""
    return _digest_of(folder, sorted(each for each in folder.iterdir() if each.suffix in WEIGHTS))


def _digest_of(folder: Path, paths: Iterable[Path]) -> str:
    """A digest of files: their names and contents; of large ones size and time of change."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        if not path.is_file():
            continue
        status = path.stat()
        large = status.st_size > LARGE_BYTES
        content = str(status.st_mtime_ns).encode() if large else path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{status.st_size}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _shipped(source: ModelLocation, dtype: str) -> Record | None:
    folder = Path(source.path)
    if dtype != "auto" or folder not in BUILTIN.values() or not (folder / SHIPPED).is_file():
        return None
    return _opened((folder / SHIPPED).read_bytes(), files_digest(folder))


def _cached(source: ModelLocation, dtype: str) -> Record | None:
    path = description_file(_place(source, dtype))
    return _opened(path.read_bytes(), _identity(source, dtype)) if path.is_file() else None


def _sealed(identity: str, record: Record) -> Record:
    """A record with what it was made from, and a digest of both."""
    sealed = {"schema": SCHEMA, "of": identity, **record}
    return sealed | {"digest": _digest(sealed)}


def _opened(data: bytes, identity: str) -> Record | None:
    """The record of a file; None if it is damaged, or was made from something else."""
    sealed = json.loads(data)
    digest = sealed.pop("digest")
    known = (sealed["schema"], sealed["of"]) == (SCHEMA, identity)
    return sealed if known and digest == _digest(sealed) else None


def _place(source: ModelLocation, dtype: str) -> str:
    """Identifies a model and a dtype, whatever the model's files hold."""
    return _digest([str(Path(source.path).resolve()), dtype])


def _identity(source: ModelLocation, dtype: str) -> str:
    """A digest of everything that a description is made from."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    return _digest(
        [_place(source, dtype), files_digest(Path(source.path)), __version__, versions, _code()]
    )


@functools.cache
def _code() -> str:
    """A digest of the modules that describe models: an editable install keeps its version."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _digest(facts: Any) -> str:
    text = json.dumps(facts, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _may_be_kept(source: ModelLocation, config: Any, files: Description) -> bool:
    """Whether a model's directory and the packages alone decide its description."""
    folder = Path(source.path)
    return (
        not source.trust_remote_code
        and source.gguf is None
        and folder.is_dir()
        and files.info.supported
        and type(config).__module__.startswith("transformers.")
        and _is_plain(files.tokenizer, folder / TOKENIZER)
    )


def _is_plain(tokenizer: Any, path: Path) -> bool:
    """Whether a Hugging Face tokenizer gives the ids and texts of a ``tokenizer.json``.

    It does if its backend is the file's, to the last setting, and it adds nothing of its own.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    cls, plain = type(tokenizer), PreTrainedTokenizerFast
    if not issubclass(cls, plain) or any(getattr(cls, s) is not getattr(plain, s) for s in STEPS):
        return False
    changes = ("chat_template", "split_special_tokens", "clean_up_tokenization_spaces")
    if any(getattr(tokenizer, each, None) for each in changes) or not path.is_file():
        return False
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()  # as `encode` does
    backend.no_padding()
    return str(backend.to_str()) == PlainTokenizer(path).serialized()
