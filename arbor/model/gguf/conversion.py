"""transformers' conversion of a GGUF file, from the header that arbor has read already.

transformers reads a file anew for its config, its tokenizer and its weights, several times each,
and a vocabulary takes it seconds. While `header_given` lasts it gets the settings and the table of
tensors from a `GGUFHeader`; every value, and what is made of it, is the same. It also sees the file
alone: a tokenizer or an adapter that lies next to it may be another model's.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from arbor.model.gguf.header import ARRAY, NUMBERS, TENSOR_TYPES, TEXT, GGUFHeader
from arbor.model.gguf.unread import check_all_read

CONVERSION = "transformers.modeling_gguf_pytorch_utils"
READER = "transformers.integrations.gguf"
# modules of transformers that took the function of `READER` when they were imported
TAKERS = (READER, f"{READER}.reader", f"{READER}.utils", "transformers.quantizers.quantizer_gguf")
LINK = "model.gguf"
EXPERTS = "_exps"  # names of these tensors are given without their ends
# architectures that transformers converts as another, once it is told so
ALIKE = {"smollm3": "llama"}
# transformers' config takes of the vocabulary its length alone; its tokenizer reads the arrays
# anew. Older versions, such as 5.17, do so for the architectures of a table alone.
VOCABULARY, TOKENS = "tokenizer.ggml.", "tokenizer.ggml.tokens"

_giving = threading.RLock()


@contextmanager
def header_given(
    header: GGUFHeader, on_tensor: Callable[[int, int], None] | None = None
) -> Iterator[tuple[str, str]]:
    """While it lasts, transformers takes the header of this file from here, and shows no bar.

    Args:
        header: of the file; other files are read as ever.
        on_tensor: called with the number of tensors converted, and of all.

    Yields:
        A folder with the file alone, and the file's name there.

    Raises:
        ModelError: what transformers converts leaves a tensor of the file out.
    """
    import gguf

    def reader(path: Any, *arguments: Any, **named: Any) -> Any:
        if not _is(path, header):
            return read(path, *arguments, **named)
        return _Reader(header, whole=whole)

    def metadata(path: Any, string_arrays: Any = ()) -> Any:
        if not _is(path, header):
            return read_metadata(path, string_arrays)
        return _metadata(header, string_arrays), tuple(each.name for each in header.tensors)

    taken: set[str] = set()

    def named(*arguments: Any, **more: Any) -> Any:
        found = places(*arguments, **more)
        taken.update(found)
        taken.update(f"{each}.weight" for each in found if each.endswith(EXPERTS))
        return found

    def counted(tensors: Any, **_: Any) -> Iterator[Any]:
        check_all_read(header, taken)
        return _counted(tensors, on_tensor)

    with _giving, ExitStack() as restored:
        read = gguf.GGUFReader
        _replace(restored, gguf, "GGUFReader", reader)
        # transformers asks for the same names once a module, 10 ms each
        _replace(restored, gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        conversion = importlib.import_module(CONVERSION)
        places = conversion.get_gguf_hf_weights_map
        _replace(restored, conversion, "get_gguf_hf_weights_map", named)
        _replace(restored, conversion, "tqdm", counted)
        _name_alike(restored, conversion)
        tokenizers = _module(f"{READER}.gguf_tokenizer_mapping")
        _replace(restored, tokenizers, "generate_merges", derived_merges)
        own = _module(f"{READER}.reader")
        read_metadata: Any = getattr(own, "read_gguf_metadata", None)
        by_itself = getattr(tokenizers, "GGUF_TOKENIZER_ARCHS", None)
        known = by_itself is None or header.get("general.architecture") in by_itself
        whole = read_metadata is None or not known
        for each in TAKERS if read_metadata else ():
            _replace(restored, _module(each), "read_gguf_metadata", metadata)
        yield _alone(restored, header.path)


def _name_alike(restored: ExitStack, conversion: Any) -> None:
    """transformers knows the architectures of `ALIKE` too, until the stack is closed."""
    settings = conversion.GGUF_TO_TRANSFORMERS_MAPPING["config"]
    for table in (settings, conversion.TENSOR_PROCESSORS):
        for name, other in ALIKE.items():
            if name not in table:
                table[name] = table[other]
                restored.callback(table.pop, name)
    _replace(restored, conversion, "GGUF_SUPPORTED_ARCHITECTURES", list(settings))


def _alone(restored: ExitStack, path: Path) -> tuple[str, str]:
    """A folder with a link to a file, until the stack is closed; without links, the file's own."""
    folder = restored.enter_context(TemporaryDirectory(prefix="arbor-gguf-"))
    try:
        (Path(folder) / LINK).symlink_to(path.resolve())
    except OSError:
        return str(path.parent), path.name
    return folder, LINK


def _is(path: Any, header: GGUFHeader) -> bool:
    """Whether a path is that of the header's file."""
    try:
        return header.path.samefile(path)
    except OSError:
        return False


def _module(name: str) -> Any:
    """A module of transformers; None where this version has none of that name."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _replace(restored: ExitStack, module: Any, name: str, value: Any) -> None:
    """Sets a name of a module that has it, until the stack is closed."""
    if module is not None and hasattr(module, name):
        restored.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)


def _counted(tensors: Iterable[Any], on_tensor: Callable[[int, int], None] | None) -> Iterator[Any]:
    """The tensors, each counted when the next is asked for."""
    listed = list(tensors)
    for number, each in enumerate(listed):
        if on_tensor is not None:
            on_tensor(number, len(listed))
        yield each


def _metadata(header: GGUFHeader, string_arrays: Any) -> dict[str, Any]:
    """The settings as transformers' own reader gives them: an array of texts is its length, unless
    it is asked for."""
    found: dict[str, Any] = {}
    for key in header:
        length = header.length(key)
        texts = length is not None and header.type_of(key) == TEXT
        found[key] = length if texts and key not in string_arrays else header.get(key)
    return found


class _Reader:
    """A header in the form of `gguf.GGUFReader`.

    Args:
        header: of the file.
        whole: with the arrays of the vocabulary.
    """

    def __init__(self, header: GGUFHeader, *, whole: bool) -> None:
        self.fields = {key: _field(header, key, whole) for key in header}
        counts = {"tensor_count": len(header.tensors), "kv_count": len(self.fields)}
        for name, value in ({"version": header.version} | counts).items():
            self.fields[f"GGUF.{name}"] = _Field([[value]], [0], [4])
        self._header = header

    @property
    def tensors(self) -> list[_Tensor]:
        """Names, types and weights; those are read when they are looked at."""
        import numpy as np
        from gguf import GGMLQuantizationType

        file = np.memmap(self._header.path, dtype=np.uint8, mode="r")
        plain = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
        whole = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
        found = []
        for each in self._header.tensors:
            name, numbers, width = TENSOR_TYPES[each.type]
            data = file[each.start : each.start + each.length]
            dtype: Any = (plain | whole).get(name)
            if dtype is not None:
                data = data.view(dtype).reshape(each.shape)
            else:
                data = data.reshape(*each.shape[:-1], each.shape[-1] // numbers * width)
            found.append(_Tensor(each.name, GGMLQuantizationType(each.type), data))
        return found


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor as `gguf.GGUFReader` gives it."""

    name: str
    tensor_type: Any
    data: Any


@dataclass(frozen=True, slots=True)
class _Field:
    """A setting as `gguf.GGUFReader` gives it: parts, which of them are data, and their types."""

    parts: Any
    data: Any
    types: list[int]


class _Same:
    """One part for every index.

    Args:
        part: the part.
    """

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getitem__(self, index: int) -> Any:
        return self._part


def _field(header: GGUFHeader, key: str, whole: bool) -> _Field:
    kind, length = header.type_of(key), header.length(key)
    if length is None:
        return _Field([_part(kind, header.get(key))], [0], [kind])
    if key.startswith(VOCABULARY) and not whole:
        counted = range(length if key == TOKENS else 0)
        return _Field(_Same((0,)), counted, [min(NUMBERS)])
    values = header.get(key)
    return _Field([_part(kind, each) for each in values], range(length), [ARRAY, kind])


def _part(kind: int, value: Any) -> Any:
    """A value as transformers takes it apart: the bytes of a text, a list of a number."""
    return value.encode() if kind == TEXT else (value,)


def derived_merges(
    vocab: dict[str, int],
    vocab_scores: dict[str, float] | None = None,
    *rest: Any,
    **more: Any,
) -> list[tuple[str, str]]:
    """What `generate_merges` of transformers returns, in two thirds of its time.

    A merge joins two tokens into a third; those into the token with the highest score come first,
    and of these the one with the longest first part. No two merges into one token are sorted.

    Args:
        vocab, vocab_scores, rest, more: as there; tokens of equal scores are left to it.
    """
    from transformers.tokenization_utils_base import generate_merges

    if vocab_scores is None or rest or more or len(set(vocab_scores.values())) < len(vocab_scores):
        found: list[tuple[str, str]] = generate_merges(vocab, vocab_scores, *rest, **more)
        return found
    merges = []
    for token in sorted(vocab_scores, key=vocab_scores.__getitem__, reverse=True):
        for end in range(len(token) - 1, 0, -1):
            first = token[:end]
            if first in vocab:
                second = token[end:]
                if second in vocab:
                    merges.append((first, second))
    return merges
