"""Fitted files: what was calibrated for a model is found again for the same weights only.

A model's directory holds its own files, and the cache folder those of other models. There a model
of the Hub is known by its id and revision, and a GGUF file on this machine by its content, whatever
it is called and wherever it lies. Its weights are read for that only where something was fitted to
a file with the same header.
"""

from __future__ import annotations

from pathlib import Path

from arbor.model.gguf.header import read_gguf_header
from arbor.model.loading import ModelLocation
from arbor.model.model_identity import content_digest
from arbor.support.cache_dir import fitted_file


def file_to_fit(name: str, source: ModelLocation) -> Path:
    """The JSON file for what is fitted to a model, which may not exist.

    Args:
        name: of what is fitted, one of `FITTED`.
        source: the model, no ready one.

    Raises:
        ModelError: a GGUF file cannot be read.
    """
    folder = Path(source.path)
    if not folder.is_dir():
        return fitted_file(name, source.file, source.revision or "main")
    if source.gguf is None:
        return folder / f"{name}.json"
    path = folder / source.gguf
    return fitted_file(name, read_gguf_header(path).digest, content_digest(path))


def found_file(name: str, source: ModelLocation) -> Path | None:
    """The JSON file of what was fitted to a model; None where nothing was.

    Nothing is fitted to a ready model, nor to one with an adapter.

    Args:
        name, source: as in `file_to_fit`.

    Raises:
        ModelError: a GGUF file cannot be read.
    """
    if not source.path or source.adapter is not None:
        return None
    folder = Path(source.path)
    if source.gguf is not None and folder.is_dir():
        header = read_gguf_header(folder / source.gguf).digest
        if not fitted_file(name, header, "").parent.is_dir():
            return None
    path = file_to_fit(name, source)
    return path if path.is_file() else None
