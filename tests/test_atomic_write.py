"""A file is written as a whole, and only files are replaced."""

from __future__ import annotations

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
