"""Pretrained models for tests: files that `scripts/fetch_models.py` has fetched.

A test asks for a fixture of `tests/conftest.py` and is skipped where the file is missing:
``smollm2`` in the default tests, ``qwen_small``, ``qwen`` and ``gemma`` in slow ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from fetch_models import MODELS, models_folder


def model_file(name: str) -> Path:
    """The file of a model of `fetch_models.MODELS`; skips the test where it is missing."""
    path = models_folder() / MODELS[name].file
    if not path.is_file():
        pytest.skip(f"{path} is missing: python scripts/fetch_models.py {name}")
    return path
