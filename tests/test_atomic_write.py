"""A file is written as a whole, and only files are replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from arbor.errors import UsageError
from arbor.support.atomic_write import write_atomically


def test_what_there_was_stays_until_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    write_atomically(path, "old")

    def full(self: Path, data: bytes) -> None:
        with self.open("wb") as file:
            file.write(data[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UsageError, match=r"\[output-unwritable\] .*No space left"):
        write_atomically(path, "new page")

    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text("utf-8") == "old"


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "run.html", tmp_path / "latest.html"
    write_atomically(path, "old")
    path.chmod(0o640)
    link.symlink_to(path)

    write_atomically(link, "caf\u00e9 \ud800")

    assert link.is_symlink() and path.read_bytes() == b"caf\xc3\xa9 \\ud800"
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("late", range(6))
def test_another_process_may_delete_what_is_replaced_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    path = tmp_path / "block.kv"
    access, stat, asked = os.access, Path.stat, 0

    def deleted() -> None:
        nonlocal asked
        if asked == late:
            path.unlink(missing_ok=True)
        asked += 1

    def stat_later(self: Path, **options: bool) -> os.stat_result:
        try:
            return stat(self, **options)
        finally:
            deleted()

    def access_later(where: Path, mode: int) -> bool:
        found = access(where, mode)
        deleted()
        return found

    path.write_text("old")
    monkeypatch.setattr(Path, "stat", stat_later)
    monkeypatch.setattr("os.access", access_later)

    write_atomically(path, "new")
    assert path.read_text("utf-8") == "new"


def test_permissions_are_asked_for_before_anything_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    write_atomically(path, "old")
    forbidden = {path}
    monkeypatch.setattr("os.access", lambda where, mode: Path(where) not in forbidden)

    with pytest.raises(UsageError, match="Permission denied"):
        write_atomically(path, "new")
    assert path.read_text("utf-8") == "old"
    forbidden = {tmp_path}  # the file may be written, and no other file was made
    inode = path.stat().st_ino
    write_atomically(path, "new")
    assert (path.read_text("utf-8"), path.stat().st_ino) == ("new", inode)
