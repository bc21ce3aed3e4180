"""A file is written as a whole, and only files are replaced."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from arbor.errors import UsageError
from arbor.files import write_whole


def test_what_there_was_stays_until_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    write_whole(path, "old")

    def full(self: Path, data: bytes) -> None:
        with self.open("wb") as file:
            file.write(data[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UsageError, match=r"\[output-unwritable\] .*No space left"):
        write_whole(path, "new page")

    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text("utf-8") == "old"


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "run.html", tmp_path / "latest.html"
    write_whole(path, "old")
    path.chmod(0o640)
    link.symlink_to(path)

    write_whole(link, "caf\u00e9 \ud800")

    assert link.is_symlink() and path.read_bytes() == b"caf\xc3\xa9 \\ud800"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()

    write_whole(pipe, b"words")

    reader.join()
    assert read == [b"words"] and pipe.is_fifo()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_device_that_takes_nothing_is_an_error_and_stays() -> None:
    with pytest.raises(UsageError, match="/dev/full cannot be written: No space left"):
        write_whole(Path("/dev/full"), b"words")
    assert Path("/dev/full").is_char_device()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Name another one") as caught:
        write_whole(tmp_path / "no" / "page.html", "words", "Name another one.")
    assert caught.value.data["path"].endswith("page.html")
