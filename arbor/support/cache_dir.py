"""The folder for files that outlive a run.

``ARBOR_CACHE``, else ``$XDG_CACHE_HOME/arbor``, else ``~/.cache/arbor``:

    msve/MODEL/VERSION.json             block values of a model, from ``arbor calibrate msve``
    alpha/MODEL/VERSION.json            alpha of it, from ``arbor calibrate window``
    exit/MODEL/VERSION.json             thresholds of CGEE for it, from ``arbor calibrate exit``
    models/ID.json                      description of a local model, for plans without torch
    tokenizers/ID.json                  its tokenizer, named by its own content
    digests/ID                          content of a large file, by its place, inode and times
    kv_probe/ID.json                    when rows read a shared span together, per model and machine
    fetch_costs/ID.json                 what fetching and recomputing KV take, likewise

A model directory holds its own block values, alpha and thresholds; Hub models are in the Hugging
Face cache. MODEL and VERSION are id and revision of a Hub model, or digests of a GGUF file's header
and content; quoted, or a digest of what is too long for a name. Every file here may be deleted.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from urllib.parse import quote

FITTED = ("alpha", "exit", "msve")  # what is fitted to a model
LONGEST = 200  # bytes of a name; file systems take 255, or less where they encrypt names


def cache_dir() -> Path:
    """The cache folder, which may not exist."""
    named = os.environ.get("ARBOR_CACHE", "").strip()
    if named:
        return Path(named).expanduser()
    shared = Path(os.environ.get("XDG_CACHE_HOME", "").strip())
    if not shared.is_absolute():  # XDG: a relative path is ignored
        shared = Path.home() / ".cache"
    return shared / "arbor"


def description_file(identity: str) -> Path:
    """The file with the description of a model on this machine, which may not exist."""
    return cache_dir() / "models" / f"{identity}.json"


def tokenizer_file(content: str) -> Path:
    """The file with a tokenizer, which may not exist."""
    return cache_dir() / "tokenizers" / f"{content}.json"


def fetch_costs_file(identity: str) -> Path:
    """The file with the measured costs of fetching and recomputing KV, which may not exist.

    Args:
        identity: of the model and the machine.
    """
    return cache_dir() / "fetch_costs" / f"{identity}.json"


def fitted_file(name: str, model: str, version: str) -> Path:
    """The JSON file of what was fitted to a model without a directory, which may not exist.

    Args:
        name: of what was fitted, one of `FITTED`.
        model: its id on the Hub, or a digest of its GGUF file's header.
        version: its revision on the Hub, or a digest of the file's content.
    """
    return cache_dir() / name / _part_of_path(model) / f"{_part_of_path(version)}.json"


def _part_of_path(text: str) -> str:
    """The name of a file or folder for a text: quoted, or its digest where that is too long."""
    quoted = quote(text, safe="")
    if len(quoted) <= LONGEST:
        return quoted
    return hashlib.sha256(quoted.encode()).hexdigest()
