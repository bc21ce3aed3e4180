"""Where arbor keeps what outlives a run: the environment decides, and no two models share a
file."""

from __future__ import annotations

from pathlib import Path

import pytest

from arbor.support.cache_dir import cache_dir, fitted_file


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


def test_what_is_fitted_to_a_model_of_any_path_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ARBOR_CACHE", str(tmp_path))
    folder = "/千问与其他语言模型的量化版本/" + 200 * "a"
    models = (f"{folder}/one.gguf", f"{folder}/two.gguf", "Some/Model")
    versions = ("main", "v1", 300 * "v")
    files = [fitted_file("msve", model, version) for model in models for version in versions]

    assert len(set(files)) == len(files)
    assert files[-2] == tmp_path / "msve" / "Some%2FModel" / "v1.json"
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
        assert file.is_file()
