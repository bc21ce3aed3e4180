"""Pretrained models for tests, found in the folder `ARBOR_TEST_MODELS`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FILES = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf"}


def model_file(name: str) -> Path:
    """The file of a model; skips the test where it is missing."""
    folder = os.environ.get("ARBOR_TEST_MODELS") or "~/.cache/arbor-test-models"
    path = Path(folder).expanduser() / FILES[name]
    if not path.is_file():
        pytest.skip(f"{path} is missing")
    return path
