"""Digests of files: by content, however alike two files are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from arbor.model import model_identity as file_digest
from arbor.model.model_identity import PART_BYTES, REMEMBERED_BYTES, content_digest

LARGE = bytes(REMEMBERED_BYTES + 1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARBOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def in_time(path: Path, data: bytes, time_ns: int = 10**18) -> Path:
    path.write_bytes(data)
    os.utime(path, ns=(time_ns, time_ns))
    return path


@pytest.mark.parametrize("size", [0, 1, REMEMBERED_BYTES, PART_BYTES, PART_BYTES + 1])
def test_equal_files_have_equal_digests_and_any_byte_counts(tmp_path: Path, size: int) -> None:
    data = bytes(size)
    first = content_digest(in_time(tmp_path / "a", data))

    assert content_digest(in_time(tmp_path / "b", data)) == first
    assert content_digest(in_time(tmp_path / "c", data + b"\0")) != first
    if size:
        assert content_digest(in_time(tmp_path / "d", data[:-1] + b"\1")) != first


def test_an_unchanged_large_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = in_time(tmp_path / "m.gguf", LARGE)
    first = content_digest(path)
    monkeypatch.setattr(file_digest, "_digest_of", lambda *_: pytest.fail("read again"))

    assert content_digest(path) == first
