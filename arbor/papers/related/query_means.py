"""QueryMeans: means of a model's queries before their position encoding, and the file of them."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arbor.errors import UsageError
from arbor.support.atomic_write import write_atomically

_FORMAT = "arbor.queries/1"
_ABOUT = "about"  # member of the archive with all that is not a number of a layer


class LayerMeans(NamedTuple):
    """Means of the queries of a layer.

    Attributes:
        query: float32 [H_q, D_k], E q.
        length: float32 [H_q, F], E |q_f| of the pairs f that the position encoding turns.
    """

    query: NDArray[np.float32]
    length: NDArray[np.float32]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Query heads, numbers of a head, and pairs of them that turn."""
        return (*self.query.shape, self.length.shape[1])


@dataclass(frozen=True, eq=False)
class QueryMeans:
    """Means of a model's queries before their position encoding, of all layers, over many texts.

    Source: the statistics that TriAttention (arXiv 2604.04921) calibrates once per model. Differs:
    real numbers in the model's own order of a head instead of complex ones, since a pair is two
    numbers of a head in a place that the model's encoding says.

    Attributes:
        layers: of each layer, the first one first.
        queries: how many of each layer.
        path: the file they were read from, for messages; empty without one.
    """

    layers: tuple[LayerMeans, ...]
    queries: int
    path: str = ""

    def check_model(self, layers: int, heads: int, head_dim: int) -> None:
        """Refuse a model of other sizes.

        Args:
            layers: of the model.
            heads: query heads of its first layer.
            head_dim: numbers of a query there.

        Raises:
            UsageError: names both.
        """
        own_heads, own_dim, _ = self.layers[0].sizes
        if (len(self.layers), own_heads, own_dim) != (layers, heads, head_dim):
            raise self._of_another(
                f"{len(self.layers)} layers, the first with {own_heads} query heads of {own_dim} numbers",
                f"{layers} layers, the first with {heads} of {head_dim}",
            )

    def of_layer(self, layer: int, heads: int, head_dim: int, pairs: int) -> LayerMeans:
        """The means of a layer.

        Args:
            layer: its number.
            heads: its query heads.
            head_dim: numbers of a query.
            pairs: those of them that the position encoding turns.

        Raises:
            UsageError: they are of a layer of other sizes; names both.
        """
        sizes = self.layers[layer].sizes if layer < len(self.layers) else None
        if sizes == (heads, head_dim, pairs):
            return self.layers[layer]
        mine = f"{len(self.layers)} layers"
        if sizes is not None:
            mine = "{} query heads of {} numbers, {} pairs of which turn".format(*sizes)
        what = f"{heads} query heads of {head_dim} numbers, {pairs} pairs of which turn"
        raise self._of_another(mine, f"{what}, in layer {layer}")

    def _of_another(self, mine: str, other: str) -> UsageError:
        return UsageError(
            "queries-model",
            f"the queries of {self.path} are of another model: they have {mine}; this model has {other}.",
            "`arbor calibrate queries --model MODEL` writes those of a model.",
            path=self.path,
        )

    def save(self, path: Path, **provenance: Any) -> None:
        """Write a file of a few hundred bytes per head: an npz archive.

        Args:
            path: where to.
            provenance: their origin (model, task, date, figures), for readers of the file.

        Raises:
            UsageError: the file cannot be written.
        """
        about = {"schema": _FORMAT, "queries": self.queries, "provenance": provenance}
        members: dict[str, Any] = {_ABOUT: np.array(json.dumps(about, sort_keys=True))}
        for number, layer in enumerate(self.layers):
            members[f"query_{number}"], members[f"length_{number}"] = layer
        archive = io.BytesIO()
        np.savez(archive, **members)
        write_atomically(path, archive.getvalue())

    @staticmethod
    def load(path: Path) -> QueryMeans:
        """Means from a file that `save` wrote.

        Raises:
            UsageError: the file cannot be read, or is not such a file.
        """
        try:
            return _read(path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise _unreadable(path, f"cannot be read: {reason}") from error
        except Exception as error:  # a damaged archive raises anything
            what = f"holds no means of queries: {type(error).__name__}: {error}"
            raise _unreadable(path, what) from error


def _read(path: Path) -> QueryMeans:
    """`QueryMeans.load`, with any error."""
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
        about = json.loads(str(archive[_ABOUT]))
        if about["schema"] != _FORMAT:
            raise ValueError(f"its schema is {about['schema']}, not {_FORMAT}")
        count = sum(name.startswith("query_") for name in archive.files)
        layers = [
            LayerMeans(
                archive[f"query_{number}"].astype(np.float32),
                archive[f"length_{number}"].astype(np.float32),
            )
            for number in range(count)
        ]
    if not layers:
        raise ValueError("it has no layers")
    for number, (query, length) in enumerate(layers):
        fits = query.ndim == length.ndim == 2 and len(query) == len(length)
        if not fits or 2 * length.shape[1] > query.shape[1]:
            raise ValueError(f"layer {number} has the shapes {query.shape} and {length.shape}")
        if not (np.isfinite(query).all() and np.isfinite(length).all()):
            raise ValueError(f"layer {number} has a number that is not finite")
    return QueryMeans(tuple(layers), int(about["queries"]), str(path))


def _unreadable(path: Path, what: str) -> UsageError:
    return UsageError(
        "queries-unreadable",
        f"{path} {what}.",
        "`arbor calibrate queries` writes such a file.",
        path=str(path),
    )
