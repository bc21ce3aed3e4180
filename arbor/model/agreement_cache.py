"""Which weights had the logits of their model's own forward when they were loaded before.

Comparing them takes as long as forty tokens of a prompt. What was found is kept next to the
descriptions of models (`arbor.model.description_cache`) and holds while everything that decides is
the same: what a description is made from, this package's kernels, how the model is loaded, and the
files of the weights, by place, inode, size and times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from arbor.errors import ArborError
from arbor.model.description_cache import WEIGHTS, keep_record, kept_record
from arbor.model.loading import ModelLocation


@dataclass(frozen=True, slots=True)
class Agreement:
    """What was found when weights were checked.

    Attributes:
        layers_form: the form in which all layers as one call gave the same bits, as in
            `ModelRunner.fuse_layers`; None: they run one by one.
    """

    layers_form: str | None


def agreed_before(source: ModelLocation, how: tuple[object, ...]) -> Agreement | None:
    """What was found of these weights; None if it is not known, or they differed.

    Args:
        source: the model.
        how: what else decides: dtype, backend, and what is asked of the layers.
    """
    try:
        record = kept_record(source, _kind(how))
        if record is None or record["made_from"] != _made_from(source):
            return None
        return Agreement(record["layers_form"])
    except (ArborError, OSError):
        return None


def keep_agreement(source: ModelLocation, how: tuple[object, ...], found: Agreement) -> None:
    """Writes what was found in place of what was known, if it may be kept; a failure is ignored.

    Args:
        source, how: as in `agreed_before`.
        found: the weights agreed.
    """
    try:
        record = asdict(found) | {"made_from": _made_from(source)}
        keep_record(source, _kind(how), record)
    except (ArborError, OSError):
        return


def _kind(how: tuple[object, ...]) -> str:
    """Names the record among those of the model."""
    return " ".join(["agreement", *map(str, how)])


def _made_from(source: ModelLocation) -> str:
    """Everything that decides and that a description is not made from."""
    from arbor.model.kv_identity import computing_code

    return "\n".join([*_weights(source), computing_code()])


def _weights(source: ModelLocation) -> Iterator[str]:
    """The files of the weights and of an adapter, as a program that changes one leaves them.

    Raises:
        OSError: one cannot be seen, as where the adapter is on the Hub.
    """
    folder = Path(source.path)
    packed = source.gguf is not None
    paths = [folder / str(source.gguf)] if packed else sorted(folder.iterdir())
    paths = [each for each in paths if packed or each.suffix in WEIGHTS]
    if source.adapter is not None:
        paths += sorted(Path(source.adapter).expanduser().iterdir())
    for path in paths:
        status = path.stat()
        times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
        yield f"{path.resolve()} {status.st_dev} {status.st_ino} {status.st_size} {times}"
