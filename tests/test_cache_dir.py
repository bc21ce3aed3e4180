"""Where arbor keeps what outlives a run: the environment decides, and no two models share a
file."""

from __future__ import annotations

from pathlib import Path

import pytest

from arbor.support.cache_dir import cache_dir


@pytest.mark.parametrize(
    ("named", "shared", "folder"),
    [
        (None, None, "/home/me/.cache/arbor"),
        (None, "/scratch/cache", "/scratch/cache/arbor"),
        (None, "relative", "/home/me/.cache/arbor"),
        (None, "", "/home/me/.cache/arbor"),
        ("/data/kept", "/scratch/cache", "/data/kept"),
        ("~/kept", None, "/home/me/kept"),
        (" ", None, "/home/me/.cache/arbor"),
    ],
)
def test_the_environment_says_where(
    monkeypatch: pytest.MonkeyPatch, named: str | None, shared: str | None, folder: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for variable, value in (("ARBOR_CACHE", named), ("XDG_CACHE_HOME", shared)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)

    assert cache_dir() == Path(folder)
