"""The folder for files that outlive a run.

``ARBOR_CACHE``, else ``$XDG_CACHE_HOME/arbor``, else ``~/.cache/arbor``:

    msve/MODEL/REVISION.json    block values of a Hub model, fitted by ``arbor calibrate msve``
    models/ID.json              description of a model directory, for plans without torch

A model directory holds its own block values; Hub models are in the Hugging Face cache. Every file
here may be deleted.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote


def cache_dir() -> Path:
    """The cache folder, which may not exist."""
    named = os.environ.get("ARBOR_CACHE", "").strip()
    if named:
        return Path(named).expanduser()
    shared = Path(os.environ.get("XDG_CACHE_HOME", "").strip())
    if not shared.is_absolute():  # XDG: a relative path is ignored
        shared = Path.home() / ".cache"
    return shared / "arbor"


def msve_file(model: str, revision: str | None) -> Path:
    """The file with the block values of a Hub model, which may not exist.

    Args:
        model: its id.
        revision: branch, tag or commit; None = its main branch.
    """
    return (
        cache_dir() / "msve" / quote(model, safe="") / f"{quote(revision or 'main', safe='')}.json"
    )


def description_file(identity: str) -> Path:
    """The file with the description of a model directory, which may not exist.

    Args:
        identity: of the directory and the dtype.
    """
    return cache_dir() / "models" / f"{identity}.json"
