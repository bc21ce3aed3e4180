"""model_identity: which weights and settings a model has, whatever its files are called."""

from __future__ import annotations

from pathlib import Path

from arbor.model.description_cache import WEIGHTS, files_digest
from arbor.model.loading import ModelLocation, cached_commit
from arbor.support.file_digest import content_digest


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
    return None if commit is None else f"{source.place}@{commit}"


def _folder_identity(folder: Path) -> str:
    """Digests of a directory's settings, and of each file of its weights."""
    weights = sorted(each for each in folder.iterdir() if each.suffix in WEIGHTS)
    named = [f"{each.name}={content_digest(each)}" for each in weights if each.is_file()]
    return " ".join([files_digest(folder), *named])
