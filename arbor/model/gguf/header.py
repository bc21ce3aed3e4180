"""GGUFHeader: what a GGUF file says before its weights, read once per process for every caller.

The format (version 2 or 3, little-endian): magic, version, counts; then settings, each a key, a
type and a value; then the table of tensors, each a name, its dimensions, a type and an offset; then
the tensors themselves, from the next multiple of the alignment. Source: the specification of ggml.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from arbor.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, unless a setting says otherwise
MOST_BYTES = 1 << 30  # of a header
FIRST_READ = 16 << 20  # bytes; a vocabulary of 262,144 tokens takes 7 MB
MOST_SETTINGS, MOST_TENSORS, MOST_DIMENSIONS = 1 << 20, 1 << 24, 8
DOWNLOAD_AGAIN = "Download the file again."
OTHER_CONVERSION = "Take another conversion of the model, as in Q4_K_M or Q8_0."

# What every file says: of its architecture, and of its kind of tokenizer.
SIZES = ("block_count", "context_length", "embedding_length", "attention.head_count")
EPSILONS = ("layer_norm_rms_epsilon", "layer_norm_epsilon")  # one of them
MIXTURES, EXPERTS = ("qwen2moe", "qwen3moe"), ("expert_count", "expert_used_count")
# Numbers of each layer; a list of equal ones is one number. transformers has others by layer.
BY_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
UNEQUAL_LAYERS = ("gemma4", "lfm2")
PARTS = {"gpt2": ("tokenizer.ggml.merges",), "llama": ("tokenizer.ggml.scores",)}
BLOCK = re.compile(r"blk\.(\d+)\.")

# Types of settings: number -> format of `struct`.
NUMBERS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"},
    **{10: "Q", 11: "q", 12: "d"},
}
TEXT, ARRAY = 8, 9

# Types of tensors: number -> name, numbers of a block, bytes of a block.
TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 28: ("F64", 1, 8), 30: ("BF16", 1, 2)},
    **{24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8)},
    **{2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24)},
    **{8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110)},
    **{12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210)},
    **{15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74)},
    **{18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18)},
    **{21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136)},
    **{29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66)},
    **{39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18)},
}
PLAIN = ("F32", "F16", "F64", "BF16", "I8", "I16", "I32", "I64")  # one number a block


# Layers of a header without tensors: a model is made of them before any is missed.
MOST_LAYERS = 1000


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in the file.

    Attributes:
        name: as llama.cpp calls it, e.g. ``blk.0.attn_q.weight``.
        shape: rows first, as torch has it; a row's numbers lie side by side.
        type: number of its type, a key of `TENSOR_TYPES`.
        start: first byte in the file.
        length: bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    start: int
    length: int

    @property
    def type_name(self) -> str:
        """As in ``Q4_K``."""
        return TENSOR_TYPES[self.type][0]


class _Array:
    """An array of settings where it lies in the header; decoded when it is asked for.

    Args:
        kind: type of an element, a key of `NUMBERS` or `TEXT`.
        length: elements.
        start: first byte of the elements.
    """

    def __init__(self, kind: int, length: int, start: int) -> None:
        self.kind, self.length, self.start = kind, length, start

    def decode(self, data: bytes) -> list[Any]:
        """The elements.

        Raises:
            UnicodeDecodeError: a text is not UTF-8.
        """
        if self.kind != TEXT:
            return list(struct.unpack_from(f"<{self.length}{NUMBERS[self.kind]}", data, self.start))
        found, at, size = [], self.start, struct.Struct("<Q").unpack_from
        for _ in range(self.length):
            begin = at + 8
            at = begin + size(data, at)[0]
            found.append(data[begin:at].decode())
        return found


class GGUFHeader:
    """Settings, vocabulary and table of tensors of a GGUF file.

    Args:
        path: of the file.
        data: its bytes up to the first tensor or more.
        size: bytes of the whole file.

    Attributes:
        path: of the file.
        size: bytes of the file.
        version: of the format.
        tensors: in the order of the file.
        data_start: first byte of the weights.
        digest: of everything before the weights: settings, vocabulary, names and shapes.

    Raises:
        struct.error, _Short: `data` ends within the header.
        ModelError: not a file of this format, or one whose numbers contradict each other.
    """

    def __init__(self, path: Path, data: bytes, size: int) -> None:
        self.path, self.size, self._data = path, size, data
        self._settings: dict[str, tuple[int, Any]] = {}  # key -> type and value
        if data[:4] != MAGIC:
            what = instead_of_weights(data) or "it does not begin with the four bytes GGUF"
            raise _damaged(path, what, "Name a GGUF file, or download it again.")
        self.version, tensors, settings = struct.unpack_from("<IQQ", data, 4)
        if self.version not in VERSIONS:
            raise _damaged(
                path,
                f"GGUF version {self.version}, and versions 2 and 3 in little-endian order are read",
                "Convert the model again with a newer llama.cpp.",
            )
        if settings > MOST_SETTINGS or tensors > MOST_TENSORS:
            raise _damaged(
                path, f"its header announces {settings:,} settings and {tensors:,} tensors"
            )
        at = 24
        for _ in range(settings):
            key, at = _text(data, at, path)
            at = self._setting(key, data, at)
        self._join_layers(data)
        found, at = self._table(data, at, tensors)
        alignment = self.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise _damaged(path, f"its alignment is {alignment!r}, not a power of two")
        for name, _, _, offset in found:
            if offset % alignment:
                where = f"begins at {offset:,}, no multiple of {alignment}"
                raise _damaged(path, f"its tensor '{name:.60}' {where}")
        self.data_start = -(-at // alignment) * alignment
        self.tensors = tuple(
            TensorPlace(name, shape, kind, self.data_start + offset, self._bytes(name, shape, kind))
            for name, shape, kind, offset in found
        )
        self._data = data[:at]
        self.digest = hashlib.blake2b(self._data, digest_size=16).hexdigest()

    def __contains__(self, key: str) -> bool:
        return key in self._settings

    def __iter__(self) -> Iterator[str]:
        """Keys of the settings, in the order of the file."""
        return iter(self._settings)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a setting: a number, a text, or a list of either.

        Raises:
            ModelError: a text is not UTF-8.
        """
        _, value = self._settings.get(key, (TEXT, default))
        if not isinstance(value, _Array):
            return value
        try:
            return value.decode(self._data)
        except UnicodeDecodeError as error:
            raise _damaged(self.path, f"'{key}' holds a text that is not UTF-8") from error

    def own(self, name: str, default: Any = None) -> Any:
        """The value of a setting of the file's architecture, by its name there."""
        return self.get(f"{self.get('general.architecture')}.{name}", default)

    def length(self, key: str) -> int | None:
        """Elements of a setting that is an array; None for any other."""
        _, value = self._settings.get(key, (TEXT, None))
        return value.length if isinstance(value, _Array) else None

    def type_of(self, key: str) -> int:
        """The type of a setting that is there, or of an array's elements: a key of `NUMBERS`, or
        `TEXT`."""
        kind, value = self._settings[key]
        return value.kind if isinstance(value, _Array) else kind

    @functools.cached_property
    def quantized(self) -> bool:
        """Whether weights are kept in blocks that share a scale."""
        return any(each.type_name not in PLAIN for each in self.tensors)

    def floats(self, name: str) -> list[float]:
        """The numbers of a small tensor; empty without one of that name.

        Raises:
            ModelError: they are not F32 or F16.
        """
        for each in self.tensors:
            if each.name == name:
                kind = {"F32": "f", "F16": "e"}.get(each.type_name)
                if kind is None:
                    raise self._unknown(name, f"numbers of type {each.type_name}")
                with self.path.open("rb") as file:
                    file.seek(each.start)
                    return list(struct.unpack(f"<{prod(each.shape)}{kind}", file.read(each.length)))
        return []

    def check(self) -> None:
        """Refuse a file that cannot be loaded, before any weight is read.

        Raises:
            ModelError: it ends before its last tensor, is one part of several, lacks settings that
                every model has, or has some that contradict its weights or its vocabulary.
        """
        end = max((each.start + each.length for each in self.tensors), default=0)
        if self.size < end:
            raise _cut(self.path, self.size, end)
        parts = self.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            part = self.get("split.no", 0)
            raise ModelError(
                "model-incomplete",
                f"{self.path} is part {part + 1} of {parts}: arbor loads a model from one file.",
                "Join the parts: llama-gguf-split --merge FIRST-PART model.gguf.",
                model=str(self.path),
            )
        self._check_sizes()
        vocabulary = self.length("tokenizer.ggml.tokens")
        for key, (_, value) in self._settings.items():
            named = key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
            if not named or vocabulary is None:
                continue
            if not isinstance(value, int) or not 0 <= value < vocabulary:
                raise _damaged(
                    self.path,
                    f"'{key}' is {value}, and its vocabulary has {vocabulary:,} tokens",
                    f"Correct the file, as in: gguf-set-metadata {self.path.name} {key} ID.",
                )

    def _check_sizes(self) -> None:
        """Refuse settings that are missing, nothing, or contradict the weights."""
        kind = self.get("general.architecture")
        if not isinstance(kind, str):
            raise _damaged(self.path, "it does not say 'general.architecture'", OTHER_CONVERSION)
        needed = [f"{kind}.{size}" for size in (*SIZES, *(EXPERTS if kind in MIXTURES else ()))]
        needed += ["tokenizer.ggml.model", "tokenizer.ggml.tokens"]
        needed += PARTS.get(self.get("tokenizer.ggml.model"), ())
        for key in needed:
            if key not in self:
                raise _damaged(self.path, f"it does not say '{key}'", OTHER_CONVERSION)
            if self.length(key) is None and self.get(key) in (0, ""):
                raise _damaged(self.path, f"its '{key}' is {self.get(key)!r}", OTHER_CONVERSION)
        if not any(f"{kind}.attention.{each}" in self for each in EPSILONS):
            says = f"it does not say '{kind}.attention.{EPSILONS[0]}'"
            raise _damaged(self.path, says, OTHER_CONVERSION)
        unequal = [each for each in BY_LAYER if self.length(f"{kind}.{each}") is not None]
        if unequal and kind not in UNEQUAL_LAYERS:
            says = f"'{kind:.20}.{unequal[0]}' differs between layers, which is not known here"
            raise _damaged(self.path, says, "Take the model's safetensors.")
        heads, groups = (self.get(f"{kind}.attention.head_count{each}") for each in ("", "_kv"))
        if isinstance(heads, int) and isinstance(groups, int) and groups and heads % groups:
            says = f"'{kind}.attention.head_count' is {heads}, no multiple of its {groups} KV heads"
            raise _damaged(self.path, says, OTHER_CONVERSION)
        blocks, width = (self.get(f"{kind}.{size}") for size in ("block_count", "embedding_length"))
        if isinstance(blocks, int) and blocks > max(len(self.tensors), MOST_LAYERS):
            says = f"'{kind}.block_count' is {blocks:,}, and it has {len(self.tensors):,} tensors"
            raise _damaged(self.path, says, OTHER_CONVERSION)
        for each in self.tensors:
            block = BLOCK.match(each.name)
            if block and isinstance(blocks, int) and int(block[1]) >= blocks:
                says = f"'{kind}.block_count' is {blocks}, and it has '{each.name:.60}'"
                raise _damaged(self.path, says, OTHER_CONVERSION)
            if each.name == "token_embd.weight" and each.shape[-1:] != (width,):
                says = f"'{kind}.embedding_length' is {width}, and '{each.name}' is {each.shape}"
                raise _damaged(self.path, says, OTHER_CONVERSION)

    def _setting(self, key: str, data: bytes, at: int) -> int:
        """Keeps one setting; returns the byte after it."""
        (kind,) = struct.unpack_from("<I", data, at)
        if key in self:
            raise _damaged(self.path, f"its header names '{key:.60}' twice")
        if kind == ARRAY:
            kind, length = struct.unpack_from("<IQ", data, at + 4)
            begin = at + 16
            if kind in NUMBERS:
                end = begin + length * struct.calcsize(f"<{NUMBERS[kind]}")
            elif kind == TEXT:
                end = _after_texts(data, begin, length)
            else:
                raise self._unknown(key, f"an array of type {kind}")
            if end > len(data):
                raise _Short
            self._settings[key] = ARRAY, _Array(kind, length, begin)
            return end
        if kind == TEXT:
            text, at = _text(data, at + 4, self.path)
            self._settings[key] = kind, text
            return at
        if kind not in NUMBERS:
            raise self._unknown(key, f"a value of type {kind}")
        (number,) = struct.unpack_from(f"<{NUMBERS[kind]}", data, at + 4)
        self._settings[key] = kind, number
        return at + 4 + struct.calcsize(f"<{NUMBERS[kind]}")

    def _join_layers(self, data: bytes) -> None:
        """Keeps one number of a list in which every layer has the same."""
        for each in BY_LAYER:
            key = f"{self.get('general.architecture')}.{each}"
            _, value = self._settings.get(key, (TEXT, None))
            if isinstance(value, _Array) and value.kind in NUMBERS:
                numbers = set(value.decode(data))
                if len(numbers) == 1:
                    self._settings[key] = value.kind, numbers.pop()

    def _table(
        self, data: bytes, at: int, count: int
    ) -> tuple[list[tuple[str, tuple[int, ...], int, int]], int]:
        """Name, shape, type and offset of each tensor, and the byte after the table."""
        found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name, at = _text(data, at, self.path)
            (dimensions,) = struct.unpack_from("<I", data, at)
            if dimensions > MOST_DIMENSIONS:
                raise _damaged(self.path, f"its tensor '{name:.60}' has {dimensions:,} dimensions")
            sizes = struct.unpack_from(f"<{dimensions}Q", data, at + 4)
            at += 4 + 8 * dimensions
            kind, offset = struct.unpack_from("<IQ", data, at)
            at += 12
            if name in found:
                raise _damaged(self.path, f"its header names the tensor '{name:.60}' twice")
            found[name] = name, sizes[::-1], kind, offset
        return list(found.values()), at

    def _bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        """Bytes of a tensor."""
        if kind not in TENSOR_TYPES:
            raise self._unknown(name, f"weights of type {kind}")
        type_name, numbers, width = TENSOR_TYPES[kind]
        if shape and shape[-1] % numbers:
            raise _damaged(
                self.path,
                f"rows of '{name:.60}' have {shape[-1]:,} numbers, and {type_name} keeps {numbers} a block",
            )
        return prod(shape) // numbers * width

    def _unknown(self, name: str, what: str) -> ModelError:
        return _damaged(
            self.path,
            f"'{name:.60}' holds {what}, which is not known here",
            OTHER_CONVERSION,
        )


class _Short(Exception):
    """The bytes read so far end within the header."""


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does, whatever its name is."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def read_gguf_header(path: Path) -> GGUFHeader:
    """The header of a GGUF file; the same object again while the file is the same.

    Raises:
        ModelError: unreadable, damaged, or cut off.
    """
    try:
        status = path.stat()
        seen = (
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )
        return _read(path, seen)
    except OSError as error:
        raise _damaged(path, f"it cannot be read: {error.strerror}", "") from error


@functools.lru_cache(maxsize=4)
def _read(path: Path, seen: tuple[int, ...]) -> GGUFHeader:
    """`read_gguf_header` of a file with this device, inode, size, and times of change."""
    wanted = FIRST_READ
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while True:
            file.seek(0)
            data = file.read(min(wanted, size))
            try:
                return GGUFHeader(path, data, size)
            except (struct.error, _Short) as error:
                if len(data) >= size:
                    what = f"it is cut off: it ends at byte {size:,}, within its header"
                    raise _damaged(path, what) from error
                if wanted >= MOST_BYTES:
                    raise _damaged(
                        path, f"its header has more than {MOST_BYTES:,} bytes"
                    ) from error
                wanted *= 4


def _text(data: bytes, at: int, path: Path) -> tuple[str, int]:
    """A text, and the byte after it."""
    (length,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + length
    if end > len(data):
        raise _Short
    try:
        return data[at + 8 : end].decode(), end
    except UnicodeDecodeError as error:
        raise _damaged(path, "its header has a text that is not UTF-8") from error


def _after_texts(data: bytes, at: int, count: int) -> int:
    """The byte after an array of texts."""
    size = struct.Struct("<Q").unpack_from
    for _ in range(count):
        if at > len(data):
            raise _Short
        at += 8 + size(data, at)[0]
    return at


def _cut(path: Path, size: int, end: int) -> ModelError:
    return ModelError(
        "model-incomplete",
        f"{path} is cut off: it ends at byte {size:,} of the {end:,} that its header announces.",
        DOWNLOAD_AGAIN,
        model=str(path),
        bytes=size,
        expected=end,
    )


def _damaged(path: Path, what: str, hint: str = DOWNLOAD_AGAIN) -> ModelError:
    return ModelError("model-incomplete", f"{path}: {what}.", hint, model=str(path))


POINTER = b"version https://git-lfs"


def instead_of_weights(data: bytes) -> str | None:
    """What is wrong with a file, as a clause; None: it is none of these.

    Args:
        data: its first bytes.
    """
    if not data:
        return "it is empty"
    if data.startswith(POINTER):
        return "it is a pointer of Git LFS, in whose folder `git lfs pull` fetches the file"
    if data.lstrip()[:1] == b"<":
        return "it is a web page"
    return None if any(data[:64]) else "it begins with zeros, as an unfinished download does"
