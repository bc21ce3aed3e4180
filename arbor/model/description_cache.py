"""Descriptions of models kept as files, so that a plan imports neither torch nor transformers.

A description is kept for a model directory or a GGUF file, and used only while everything that it
was made from is the same: a directory's files, or all that a GGUF file says before its weights; the
dtype; and the versions of Python's packages and of this one's modules. Any other file is ignored
and replaced. A GGUF file is known by its content, whatever it is called and wherever it lies.

Descriptions are in the cache folder (`arbor.support.cache_dir`), and next to them the tokenizers,
each a ``tokenizer.json`` named by its own content. What belongs to the built-in model is shipped
with it, in `SHIPPED`, which ``scripts/describe_sapling.py`` writes.

Never kept: models of the Hub, whose files may change with the cache; models whose Python code is
trusted, which may do anything; tokenizers whose class changes what their file says.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from arbor._version import __version__
from arbor.errors import ArborError
from arbor.kernels.native import native_state
from arbor.model.gguf.header import read_gguf_header
from arbor.model.loading import BUILTIN, GGUF_PACKAGES, ModelLocation, load_tokenizer
from arbor.model.model_info import Description, ModelInfo
from arbor.model.plain_tokenizer import PlainTokenizer, plain_parts
from arbor.model.sampling_params import Sampling
from arbor.support.atomic_write import write_atomically
from arbor.support.cache_dir import FITTED, description_file, tokenizer_file
from arbor.support.digests import digest_of_code, digest_of_facts
from arbor.support.garbage import no_collection

SCHEMA = "arbor.description/1"
SHIPPED = "description.json"
TOKENIZER = "tokenizer.json"
PACKAGES = ("tokenizers", "torch", "transformers")
# files of a model's directory that hold none of its settings
WEIGHTS = (".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors")
OTHER_FILES = (
    *(SHIPPED, *(f"{name}.json" for name in FITTED)),
    *("README.md", "LICENSE", ".gitattributes", ".gitignore"),
)
TEMPLATES = "additional_chat_templates"  # the only folder that transformers reads
LARGE_BYTES = 64 << 20  # larger files are identified by their size and time of change

Record = dict[str, Any]


def kept_description(source: ModelLocation, dtype: str) -> Description | None:
    """The description of a model from a file; None if there is none that is still true.

    Args:
        source: the model.
        dtype: as in `resolve_dtype`.
    """
    if not _is_stable(source):
        return None
    try:
        record = _shipped(source, dtype) or _cached(source, dtype)
        tokenizer = None if record is None else kept_tokenizer(source)
        if record is None or tokenizer is None:
            return None
        info = record["info"] | {"head_dims": tuple(record["info"]["head_dims"])}
        return Description(
            tokenizer,
            ModelInfo(id=source.name, revision=None, **info),
            Sampling(**record["sampling"]),
        )
    except Exception:  # whatever a damaged file holds: the model is then read as without one
        return None


def kept_tokenizer(source: ModelLocation) -> PlainTokenizer | None:
    """The tokenizer of a model from a file; None if there is none that is still true."""
    if not _is_stable(source):
        return None
    try:
        if _shipped(source, "auto") is not None:
            return PlainTokenizer.of_file(Path(source.path) / TOKENIZER)
        record = _cached(source, TOKENIZER)
        if record is None:
            return None
        serialized = tokenizer_file(record["content"]).read_bytes()
        if _digest_of_bytes(serialized) != record["content"]:
            return None
        return PlainTokenizer(
            serialized, record["chat_template"], record["special_tokens"], source.file
        )
    except Exception:
        return None


def light_tokenizer(source: ModelLocation) -> Any:
    """A model's tokenizer: a `PlainTokenizer` where one is kept, else transformers', then kept.

    Raises:
        ModelError: no readable tokenizer.
    """
    known = kept_tokenizer(source)
    if known is not None:
        return known
    with no_collection():
        tokenizer = load_tokenizer(source)
        keep_tokenizer(source, tokenizer)
    return tokenizer


def keep_description(source: ModelLocation, dtype: str, config: Any, files: Description) -> None:
    """Writes the description of a model that was read, if it may be kept; a failure is ignored.

    Args:
        source, dtype: as in `kept_description`.
        config: the model's config.
        files: what was read.
    """
    own = type(config).__module__.startswith("transformers.")
    if own and files.info.supported and keep_tokenizer(source, files.tokenizer):
        keep_record(source, dtype, record_of(files))


def keep_tokenizer(source: ModelLocation, tokenizer: Any) -> bool:
    """Writes a Hugging Face tokenizer, if it may be kept; returns whether it could be."""
    parts = plain_parts(tokenizer) if _is_stable(source) else None
    if parts is None:
        return False
    serialized, template, special = parts
    content = _digest_of_bytes(serialized)
    path = tokenizer_file(content)
    try:
        if not path.is_file() or _digest_of_bytes(path.read_bytes()) != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, serialized)
    except (OSError, ArborError):
        return False
    record = {"content": content, "chat_template": template, "special_tokens": special}
    return keep_record(source, TOKENIZER, record)


def kept_record(source: ModelLocation, kind: str) -> Record | None:
    """A record of a model from a file; None if there is none that is still true.

    Args:
        source: the model.
        kind: identifies the record among those of the model.

    Raises:
        OSError, ArborError: the record, or the model, cannot be read.
    """
    return _cached(source, kind) if _is_stable(source) else None


def keep_record(source: ModelLocation, kind: str, record: Record) -> bool:
    """Writes a record, if it may be kept; returns whether it could be written.

    Args:
        source, kind: as in `kept_record`.
        record: as JSON.
    """
    if not _is_stable(source):
        return False
    try:
        path = description_file(_place(source, kind))
        sealed = _sealed(_identity(source, kind), record)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(sealed, indent=1) + "\n")
    except (OSError, ArborError, metadata.PackageNotFoundError):
        return False
    return True


def _is_stable(source: ModelLocation) -> bool:
    """Whether files on this machine, and the packages, alone decide what a model is."""
    return not source.trust_remote_code and Path(source.path).is_dir()


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


def _cached(source: ModelLocation, kind: str) -> Record | None:
    path = description_file(_place(source, kind))
    return _opened(path.read_bytes(), _identity(source, kind)) if path.is_file() else None


def _sealed(identity: str, record: Record) -> Record:
    """A record with what it was made from, and a digest of both."""
    sealed = {"schema": SCHEMA, "of": identity, **record}
    return sealed | {"digest": digest_of_facts(sealed)}


def _opened(data: bytes, identity: str) -> Record | None:
    """The record of a file; None if it is damaged, or was made from something else."""
    try:
        sealed = json.loads(data)
        if not isinstance(sealed, dict):
            return None
        digest = sealed.pop("digest", None)
        known = (sealed.get("schema"), sealed.get("of")) == (SCHEMA, identity)
        return sealed if known and digest == digest_of_facts(sealed) else None
    except (ValueError, RecursionError):  # also of lists within lists, deeper than Python goes
        return None


def _place(source: ModelLocation, kind: str) -> str:
    """Identifies a model and a record of it: a dtype, `TOKENIZER`, or as `kept_record` has it.

    A directory is identified by its path, and its files may change; a GGUF file by its header.
    """
    if source.gguf is not None:
        return digest_of_facts([_header_digest(source), kind])
    return digest_of_facts([str(Path(source.path).resolve()), kind])


def _identity(source: ModelLocation, kind: str) -> str:
    """A digest of everything that a record is made from."""
    packed = source.gguf is not None
    packages = (*PACKAGES, *GGUF_PACKAGES) if packed else PACKAGES
    versions = {name: metadata.version(name) for name in packages}
    versions["native kernels"] = native_state()  # by which weights are in blocks, or dense
    made_from = _header_digest(source) if packed else files_digest(Path(source.path))
    return digest_of_facts([_place(source, kind), made_from, __version__, versions, _code()])


def _header_digest(source: ModelLocation) -> str:
    assert source.gguf is not None, "only a GGUF file has a header"
    return read_gguf_header(Path(source.path) / source.gguf).digest


@functools.cache
def _code() -> str:
    """A digest of the modules that describe models."""
    return digest_of_code(sorted(Path(__file__).parent.rglob("*.py")))


def _digest_of_bytes(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
