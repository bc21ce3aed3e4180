"""The built-in model and SmolLM2, read and loaded once in this process for each of their settings.

A test file whose subject is not loading asks for the fixture ``loaded_once``; its solvers share
one runner of each kind, as the searches of one solver do. Solvers of other models, and those of
ready ones, load their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.real_models import MODELS, models_folder

from arbor.model import weights
from arbor.model.loading import BUILTIN, ModelLocation
from arbor.model.model_info import Files

FILES: dict[Any, Files] = {}
WEIGHTS: dict[Any, weights.Weights] = {}
SMOLLM2 = models_folder() / MODELS["smollm2"].file
PLACES = {str(path) for path in (*BUILTIN.values(), SMOLLM2)}  # of a GGUF file: itself

_read_files, _load_weights = weights.read_files, weights.load_weights


def read_files(
    source: ModelLocation, given: Any, tokenizer: Any, dtype: str, *, keep: bool
) -> Files:
    """`weights.read_files`, once."""
    if _place(source) not in PLACES or given is not None or tokenizer is not None or keep:
        return _read_files(source, given, tokenizer, dtype, keep=keep)
    if (source, dtype) not in FILES:
        FILES[source, dtype] = _read_files(source, given, tokenizer, dtype, keep=keep)
    return FILES[source, dtype]


def load_weights(
    source: ModelLocation, given: Any, files: Files, **settings: Any
) -> weights.Weights:
    """`weights.load_weights`, once."""
    if _place(source) not in PLACES or given is not None:
        return _load_weights(source, given, files, **settings)
    key = (source, files.info.dtype, *sorted(settings.items()))
    if key not in WEIGHTS:
        WEIGHTS[key] = _load_weights(source, given, files, **settings)
    return WEIGHTS[key]


def _place(source: ModelLocation) -> str:
    return source.path if source.gguf is None else str(Path(source.path, source.gguf))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the solvers of a test share what was loaded."""
    monkeypatch.setattr(weights, "read_files", read_files)
    monkeypatch.setattr(weights, "load_weights", load_weights)
