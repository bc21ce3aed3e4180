"""Measured sizes of searches: the KV that full retention of each kind of search held at its peak.

A ratio as a budget is a part of their mean. A model directory may hold measured sizes in
``search_sizes.json``; sizes of other searches are learned, one after each finished search, in the
cache directory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from arbor import components
from arbor.errors import UsageError
from arbor.support.atomic_write import write_atomically
from arbor.support.cache_dir import search_sizes_file

if TYPE_CHECKING:
    from arbor.controllers.base import Controller
    from arbor.tasks.base import BlockLimits, Task
    from arbor.verifiers.base import Verifier

logger = logging.getLogger(__name__)

SCHEMA = "arbor.search_sizes/1"
FILE = "search_sizes.json"
MOST_TOKENS = 10**15
_PARTS = ("task", "controller", "verifier")  # components of a kind


@dataclass(frozen=True, slots=True)
class SearchKind:
    """A kind of search: whatever decides how much KV it holds, the prompt and the seed excluded.

    Sampling, data type and retention are not included: a size is an expectation, and searches that
    differ in these only are taken for the same kind.

    Attributes:
        task, controller, verifier: name and settings, as JSON.
        step_tokens: most tokens of one block.
        max_depth: most blocks on one path.
        max_expansions: most leaves grown; None: no limit.
    """

    task: str
    controller: str
    verifier: str
    step_tokens: int
    max_depth: int
    max_expansions: int | None = None

    @classmethod
    def of(
        cls,
        task: Task,
        controller: Controller,
        verifier: Verifier,
        boundary: BlockLimits,
        max_expansions: int | None,
    ) -> Self:
        """The kind of a search with these parts and limits."""
        return cls(
            _text(components.spec_of(task)),
            _text(components.spec_of(controller)),
            _text(components.spec_of(verifier)),
            step_tokens=boundary.max_tokens,
            max_depth=boundary.max_depth,
            max_expansions=max_expansions,
        )

    def to_dict(self) -> dict[str, Any]:
        """Its parts as JSON values."""
        parts = {name: json.loads(getattr(self, name)) for name in _PARTS}
        return {**asdict(self), **parts}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The kind of `to_dict`; other entries are ignored.

        Raises:
            KeyError, ValueError: an entry is missing or of another type.
        """
        limits = (_count(data["step_tokens"], 1), _count(data["max_depth"], 1))
        most = data["max_expansions"]
        if not all(isinstance(data[name], dict) for name in _PARTS):
            raise ValueError("task, controller and verifier are tables")
        task, controller, verifier = (_text(data[name]) for name in _PARTS)
        return cls(task, controller, verifier, *limits, None if most is None else _count(most, 1))


@dataclass(frozen=True, slots=True)
class SearchSize:
    """Tokens that full retention of one kind of search held at its peak, the prompt excluded.

    Attributes:
        n: searches measured.
        mean, deviation: mean and sample standard deviation of their tokens.
        least, most: the smallest and the largest of them.
    """

    n: int
    mean: float
    deviation: float
    least: int
    most: int

    def __post_init__(self) -> None:
        plain = all(math.isfinite(each) for each in (self.mean, self.deviation))
        if not (plain and self.n >= 1 and 0 <= self.least <= self.mean <= self.most):
            raise ValueError(f"{self} is not a measured size")
        if self.deviation < 0 or self.most > MOST_TOKENS:
            raise ValueError(f"{self} is not a measured size")

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Self:
        """The size of one search or more."""
        first, *others = sizes
        measured = cls(1, float(first), 0.0, first, first)
        for each in others:
            measured = measured.add(each)
        return measured

    def add(self, tokens: int) -> Self:
        """With one more search (Welford's update)."""
        n = self.n + 1
        mean = self.mean + (tokens - self.mean) / n
        squares = self.deviation**2 * (self.n - 1) + (tokens - self.mean) * (tokens - mean)
        least, most = min(self.least, tokens), max(self.most, tokens)
        return replace(
            self,
            n=n,
            mean=min(max(mean, float(least)), float(most)),
            deviation=math.sqrt(max(0.0, squares) / (n - 1)),
            least=least,
            most=most,
        )

    @property
    def expected(self) -> int:
        """The mean, rounded up."""
        return math.ceil(self.mean)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The size of `asdict`; other entries are ignored.

        Raises:
            KeyError, ValueError: an entry is missing or of another type, or no size is like that.
        """
        n, least, most = (_count(data[name], 0) for name in ("n", "least", "most"))
        mean, deviation = data["mean"], data["deviation"]
        if not isinstance(mean, int | float) or not isinstance(deviation, int | float):
            raise ValueError("mean and deviation are numbers")
        return cls(n, float(mean), float(deviation), least, most)


Sizes = Mapping[SearchKind, SearchSize]


def sizes_text(sizes: Sizes, **provenance: Any) -> str:
    """The file of measured sizes, as JSON.

    Args:
        sizes: by kind.
        provenance: their origin (model, problems, date), for readers of the file.
    """
    rows = [{**kind.to_dict(), **asdict(size)} for kind, size in sizes.items()]
    document = {"schema": SCHEMA, "searches": rows, "provenance": provenance}
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def read_sizes(path: Path) -> dict[SearchKind, SearchSize]:
    """The sizes in a file of `sizes_text`; none if it cannot be read.

    Raises:
        ValueError: not such a file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return {}
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            raise ValueError(f"its schema is {document['schema']}, not {SCHEMA}")
        rows = document["searches"]
        return {SearchKind.from_dict(row): SearchSize.from_dict(row) for row in rows}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} holds no measured sizes of searches: {error}") from error


class SearchSizes:
    """Measured sizes of the searches of one model, read once per kind and learned from runs.

    The answer for a kind never changes while this object lives, so that all searches of one solver
    give a ratio the same meaning.

    Args:
        model: id on the Hub, or path of the directory; sizes in a directory are never changed.
            Empty for a ready model: nothing is known or learned.
        revision: branch, tag or commit of a model of the Hub.
    """

    def __init__(self, model: str, revision: str | None = None) -> None:
        self._model = model
        self._revision = revision
        self._known: dict[SearchKind, SearchSize | None] = {}

    def expected(self, kind: SearchKind) -> SearchSize | None:
        """The measured size of a kind of search; None: not measured."""
        if kind not in self._known:
            self._known[kind] = self._shipped().get(kind) or self._learned().get(kind)
        return self._known[kind]

    def learn(self, kind: SearchKind, tokens: int) -> None:
        """Add one search to the measurements, unless the model's own files have its kind.

        Never fails: without a writable cache directory nothing is learned. Of two searches that
        end at the same time one may be lost; the file is always whole.
        """
        if not self._model:
            return
        try:
            if kind in self._shipped():
                return
            sizes = self._learned()
            measured = sizes.get(kind)
            sizes[kind] = SearchSize.of([tokens]) if measured is None else measured.add(tokens)
            path = self._file
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, sizes_text(sizes, model=self._model, revision=self._revision))
        except (OSError, UsageError, ValueError) as error:
            logger.debug("the size of a search is not kept: %s", error)

    def _shipped(self) -> dict[SearchKind, SearchSize]:
        """Sizes in the model's directory."""
        if not self._model or not Path(self._model).is_dir():
            return {}
        return _readable(Path(self._model) / FILE)

    def _learned(self) -> dict[SearchKind, SearchSize]:
        """Sizes in the cache directory."""
        return _readable(self._file) if self._model else {}

    @property
    def _file(self) -> Path:
        """The model's file in the cache directory."""
        folder = Path(self._model)
        if not folder.is_dir():
            return search_sizes_file(self._model, self._revision)
        path = str(folder.resolve())
        digest = hashlib.blake2b(path.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        return search_sizes_file(f"{folder.resolve().name[:40]}-{digest}", None)


class GivenSizes(SearchSizes):
    """Measured sizes that no search changes, and that are read anew for each."""

    def expected(self, kind: SearchKind) -> SearchSize | None:
        """The measured size of a kind of search; None: not measured."""
        return self._shipped().get(kind) or self._learned().get(kind)

    def learn(self, kind: SearchKind, tokens: int) -> None:
        """Nothing: kinds of search that strangers choose would fill the file."""


def _readable(path: Path) -> dict[SearchKind, SearchSize]:
    """The sizes in a file; none, with a warning, if it holds something else."""
    try:
        return read_sizes(path)
    except ValueError as error:
        logger.warning("%s; it is ignored", error)
        return {}


def _text(spec: Mapping[str, Any]) -> str:
    """A component's name and settings, in one spelling."""
    return json.dumps(spec, sort_keys=True, default=str)


def _count(value: Any, least: int) -> int:
    """A whole number.

    Raises:
        ValueError: another value, or one below `least`.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r:.40} is not a whole number of at least {least}")
    return value
