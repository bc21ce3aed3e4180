"""PromptFiles: KV of prompts in files that outlive the process, for later runs."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.errors import UsageError
from arbor.forest import LEAST_COMMON
from arbor.support.atomic_write import write_atomically

logger = logging.getLogger(__name__)

BLOCK = LEAST_COMMON  # tokens per file; the rest of a prompt is not kept
FORMAT = "arbor.kv/1"  # part of every identity: files of another layout are not found
MAGIC = b"arborkv1"
HEADER = struct.Struct("<8s16sII")  # magic, key, CRC-32 of what follows, unused
RECOUNT = 16  # the folder is read again after writing a 16th of its limit: others write there too
ABANDONED_S = 3600  # age of a draft that no process finishes any more

_MODEL = re.compile(r"[0-9a-f]{32}")
_ENTRY = re.compile(r"[0-9a-f]{32}\.kv")
_DRAFT = re.compile(r"\.arbor-\d+-\d+")

Offsets = NDArray[np.int64]


class Entry(NamedTuple):
    """A file of the folder; tuples sort by age, the least recently used first."""

    used_ns: int
    size: int
    path: str


class PromptFiles:
    """KV of the first tokens of prompts, `BLOCK` tokens per file, in a folder of limited size.

    A file is named by a digest of the identity (model, dtype, shape, format) and of all tokens up
    to its last one, so that prompts which begin alike have their first files in common, and nothing
    is found for another model. Positions follow: a prompt begins at 0.

    Processes share the folder without locks. A file appears whole (written elsewhere, then renamed)
    and is never changed; two processes that write the same one write equal tokens' KV. A file that
    vanishes between look-up and read was evicted by another process, and its tokens are computed.
    Times of modification order the files by use: of one prompt the first file counts as used last,
    since the others cannot be found without it.

    Damaged, truncated and foreign files are deleted when they are read. Whatever fails (a full
    disk, a folder that cannot be written) is reported once in the log; no method raises for it.
    Where a file cannot stand, as in the place of a folder, no more of its prompt is kept.

    Args:
        folder: created when it is first written.
        identity: digest of everything that the bits of K/V depend on besides the tokens, 32
            hexadecimal digits.
        limit: bytes of all files in the folder, those of other models included.
    """

    def __init__(self, folder: Path, identity: str, limit: int) -> None:
        assert _MODEL.fullmatch(identity), "an identity has 32 hexadecimal digits"
        self._root = folder
        self._folder = folder / identity
        self._identity = bytes.fromhex(identity)
        self._limit = limit
        # damaged ones that could not be deleted, and those in whose place is something else
        self._unusable: set[bytes] = set()
        self._writable = True
        self._held: int | None = None  # bytes in the folder, as far as is known
        self._written = 0  # bytes since they were counted

    def find(self, tokens: NDArray[np.int64]) -> int:
        """How many first tokens of a prompt have KV here; never its last one, which is computed in
        any case, for its logits.

        Args:
            tokens: int64 [n].
        """
        count = 0
        for key in self._keys(tokens):
            if key in self._unusable or not self._exists(key):
                break
            count += BLOCK
        return min(count, max(0, len(tokens) - 1))

    def load(
        self, tokens: NDArray[np.int64], offsets: Offsets, numbers: int, dtype: torch.dtype
    ) -> Iterator[tuple[Offsets, Tensor]]:
        """K and V of tokens, bit for bit as they were saved, file by file.

        Args:
            tokens: int64 [n], the prompt.
            offsets: int64 [m], which of them, increasing, below `find`.
            numbers: per token, `KVPool.numbers`.
            dtype: of the pool.

        Yields:
            int64 [k] offsets of one file's tokens, and [k, numbers] on the CPU; nothing for a file
            that is gone or damaged.
        """
        keys = list(self._keys(tokens))
        size = BLOCK * numbers * dtype.itemsize
        blocks = offsets // BLOCK
        damaged: list[str] = []
        for block in np.unique(blocks).tolist():
            data = self._read(keys[block], size, damaged)
            if data is not None:
                mine = offsets[blocks == block]
                rows = torch.from_numpy(data).view(dtype).view(BLOCK, numbers)
                yield mine, rows[torch.from_numpy(mine - block * BLOCK)]
        self._touch(keys[: int(blocks.max(initial=-1)) + 1])
        if damaged:
            logger.warning(
                "%d damaged file(s) with KV of prompts dropped, their tokens are computed again: %s",
                len(damaged),
                "; ".join(damaged[:3]),
            )

    def save(
        self, tokens: NDArray[np.int64], bytes_per_token: int, rows_of: Callable[[Offsets], Tensor]
    ) -> None:
        """Keep what is not here yet of a prompt's whole blocks, within the limit; the first call
        deletes what earlier runs kept beyond it.

        Args:
            tokens: int64 [n].
            bytes_per_token: of all layers.
            rows_of: K and V of the tokens at these offsets, [k, numbers] as `KVPool.gather` gives
                them, on any device.
        """
        if not self._writable:
            return
        size = HEADER.size + BLOCK * bytes_per_token
        usable = takewhile(lambda key: not self._is_unusable(key), self._keys(tokens))
        keys = list(islice(usable, self._limit // size))
        missing = [block for block, key in enumerate(keys) if not self._exists(key)]
        if missing or self._held is None:
            self._touch(keys)  # those that are there must not make room for the others
            try:
                if missing:
                    self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._make_room(len(missing) * size)
                for block in missing:
                    rows = rows_of(np.arange(block * BLOCK, (block + 1) * BLOCK))
                    self._write(keys[block], rows)
            except (OSError, UsageError) as error:
                self._writable = False
                logger.warning("no more KV of prompts is kept: %s", error)
        self._touch(keys)

    # Files

    def _keys(self, tokens: NDArray[np.int64]) -> Iterator[bytes]:
        """The key of each whole block of a prompt: a digest of the identity and all tokens up to
        its last one."""
        key = self._identity
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            block = tokens[end - BLOCK : end].astype("<i8").tobytes()
            key = hashlib.blake2b(key + block, digest_size=16).digest()
            yield key

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}.kv"

    def _exists(self, key: bytes) -> bool:
        try:
            return self._path(key).is_file()
        except OSError:  # the folder may not be read
            return False

    def _is_unusable(self, key: bytes) -> bool:
        """Whether no file of this name can be read or written; reported once."""
        path = self._path(key)
        if key not in self._unusable:
            with contextlib.suppress(OSError):  # none yet, or deleted by now
                if not stat.S_ISREG(path.stat().st_mode):
                    self._unusable.add(key)
                    logger.warning("no KV of prompts is kept in %s: it is not a file", path)
        return key in self._unusable

    def _read(self, key: bytes, size: int, damaged: list[str]) -> NDArray[np.uint8] | None:
        """What a file holds, uint8 [size]; None: it is gone, or damaged and deleted.

        Args:
            size: bytes after its header.
            damaged: takes a line for a file that is not what was written.
        """
        path = self._path(key)
        reason = "damaged"
        try:
            if path.stat().st_size == HEADER.size + size:
                data = np.fromfile(path, np.uint8)
                head, body = data[: HEADER.size], data[HEADER.size :]
                if head.tobytes() == _header(key, body):
                    return body
            else:
                reason = "of another size"
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = error.strerror or "unreadable"
        damaged.append(f"{path.name} ({reason})")
        self._unusable.add(key)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            self._unusable.discard(key)
        return None

    def _write(self, key: bytes, rows: Tensor) -> None:
        """Write a file.

        Raises:
            UsageError: it cannot be written.
        """
        body = rows.to("cpu").contiguous().view(torch.uint8).numpy().reshape(-1)
        write_atomically(self._path(key), _header(key, body) + body.tobytes())

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Mark files as used now, the first one last."""
        now = time.time_ns()
        for place, key in enumerate(keys):
            with contextlib.suppress(OSError):
                os.utime(self._path(key), ns=(now - place, now - place))

    # The limit

    def _make_room(self, size: int) -> None:
        """Delete the least recently used files until so many bytes can be added.

        Args:
            size: at most the limit.
        """
        often = self._limit // RECOUNT
        if self._held is None or self._held + size > self._limit or self._written > often:
            entries = sorted(self._entries())
            self._held, self._written = sum(entry.size for entry in entries), 0
            for entry in entries:
                if self._held + size <= self._limit:
                    break
                Path(entry.path).unlink(missing_ok=True)
                self._held -= entry.size
        self._held += size
        self._written += size

    def _entries(self) -> Iterator[Entry]:
        """The files of all models in the folder; drafts that a killed process left are deleted, and
        nothing else is touched."""
        for model in _scan(self._root, _MODEL) if self._root.exists() else ():
            files: list[os.DirEntry[str]] = []
            with contextlib.suppress(OSError):  # no folder, another user's, or deleted by now
                files = _scan(model.path, None)
            for file in files:
                with contextlib.suppress(FileNotFoundError):  # another process deletes too
                    status = file.stat()
                    if _ENTRY.fullmatch(file.name) and stat.S_ISREG(status.st_mode):
                        yield Entry(status.st_mtime_ns, status.st_size, file.path)
                    elif _DRAFT.fullmatch(file.name) and _is_abandoned(status):
                        Path(file.path).unlink(missing_ok=True)


def _header(key: bytes, body: NDArray[np.uint8]) -> bytes:
    return HEADER.pack(MAGIC, key, zlib.crc32(body.data), 0)


def _is_abandoned(status: os.stat_result) -> bool:
    return time.time() - status.st_mtime > ABANDONED_S


def _scan(folder: Path | str, names: re.Pattern[str] | None) -> list[os.DirEntry[str]]:
    """The entries of a folder, or those whose names match."""
    with os.scandir(folder) as found:
        return [each for each in found if names is None or names.fullmatch(each.name)]
