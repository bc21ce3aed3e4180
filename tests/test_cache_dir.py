"""Where arbor keeps what outlives a run: the environment decides, and no two models share a
file."""

from __future__ import annotations

from pathlib import Path

import pytest

from arbor.support.cache_dir import cache_dir, msve_file


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


def test_every_model_and_revision_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARBOR_CACHE", "/kept")
    models = ("A/b", "A--b", "A%2Fb", "a/b", "gpt2")
    revisions = ("v1", "refs/pr/1", "refs-pr-1", "..", "../..", "v1.json")
    files = [msve_file(model, revision) for model in models for revision in revisions]

    assert len(set(files)) == len(files)
    assert {file.resolve().parents[1] for file in files} == {Path("/kept/msve")}
    assert msve_file("A/b", None) == msve_file("A/b", "main")
