"""model_identity: which weights and settings a model has, whatever its files are called."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from arbor.errors import ArborError
from arbor.model.description_cache import WEIGHTS, files_digest
from arbor.model.loading import ModelLocation, cached_commit
from arbor.support.atomic_write import write_atomically
from arbor.support.cache_dir import cache_dir

FOLDER = "digests"  # in the cache folder
PART_BYTES = 8 << 20
MOST_THREADS = 8
REMEMBERED_BYTES = 1 << 20  # smaller files are read each time
DIGEST_BYTES = 16


def content_digest(path: Path) -> str:
    """A digest of a file's content.

    That of a large file is remembered for its place, inode, size, and times: of the content, which
    anyone may set, and of the inode, which no program can. So another file of equal size and time
    is read, and so is one that was written to.

    Raises:
        OSError: it cannot be read.
    """
    status = path.stat()
    if status.st_size < REMEMBERED_BYTES:
        return _digest_of(path, status.st_size)
    seen = [str(path.resolve()), status.st_dev, status.st_ino, status.st_size]
    seen += [status.st_mtime_ns, status.st_ctime_ns]
    key = hashlib.blake2b(json.dumps(seen).encode(), digest_size=DIGEST_BYTES).hexdigest()
    remembered = cache_dir() / FOLDER / key
    with contextlib.suppress(OSError, ValueError):
        known = remembered.read_text(encoding="ascii")
        if len(bytes.fromhex(known)) == DIGEST_BYTES:
            return known
    found = _digest_of(path, status.st_size)
    with contextlib.suppress(OSError, ArborError):
        remembered.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(remembered, found)
    return found


def _digest_of(path: Path, size: int) -> str:
    """A digest of the digests of a file's parts, computed side by side."""
    starts = range(0, size, PART_BYTES)
    with path.open("rb") as file:
        descriptor = file.fileno()

        def part(start: int) -> bytes:
            return hashlib.blake2b(os.pread(descriptor, PART_BYTES, start)).digest()

        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
            digests = b"".join(pool.map(part, starts))
    return hashlib.blake2b(digests, digest_size=DIGEST_BYTES).hexdigest()


def model_identity(source: ModelLocation) -> str | None:
    """A model's weights and settings: a digest of its files' contents, or its commit on the Hub.

    None for a ready model, and for one of the Hub, or an adapter of it, whose commit is not known.
    """
    if not source.path:
        return None
    found = _base_identity(source)
    if source.adapter is None or found is None:
        return found
    adapter = Path(source.adapter).expanduser()
    return f"{found} {_folder_identity(adapter)}" if adapter.is_dir() else None


def _base_identity(source: ModelLocation) -> str | None:
    """`model_identity` without the adapter."""
    folder = Path(source.path)
    if folder.is_dir():
        if source.gguf is not None:
            return content_digest(folder / source.gguf)
        return _folder_identity(folder)
    commit = cached_commit(source)
    return None if commit is None else f"{source.file}@{commit}"


def _folder_identity(folder: Path) -> str:
    """Digests of a directory's settings, and of each file of its weights."""
    weights = sorted(each for each in folder.iterdir() if each.suffix in WEIGHTS)
    named = [f"{each.name}={content_digest(each)}" for each in weights if each.is_file()]
    return " ".join([files_digest(folder), *named])
