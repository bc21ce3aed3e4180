"""A file is written as a whole, and only files are replaced."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from arbor.cli.output_paths import refuse_unwritable
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


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()

    write_atomically(pipe, b"words")

    reader.join()
    assert read == [b"words"] and pipe.is_fifo()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_device_that_takes_nothing_is_an_error_and_stays() -> None:
    with pytest.raises(UsageError, match="/dev/full cannot be written: No space left"):
        write_atomically(Path("/dev/full"), b"words")
    assert Path("/dev/full").is_char_device()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_what_may_not_be_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_atomically(path, "old")
    path.chmod(0o444)
    with pytest.raises(UsageError, match="Permission denied"):
        write_atomically(path, "new")
    path.chmod(0o644)
    tmp_path.chmod(0o555)
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


def test_stdout_by_its_name_is_added_to(tmp_path: Path) -> None:
    code = "from pathlib import Path; from arbor.support.atomic_write import write_atomically; print('one', flush=True); "
    code += "write_atomically(Path('/dev/stdout'), 'two\\n'); print('three')"
    with (tmp_path / "all.txt").open("ab") as out:
        out.write(b"zero\n")
        out.flush()
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)

    assert (tmp_path / "all.txt").read_text("utf-8") == "zero\none\ntwo\nthree\n"


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_a_file_below_dev_is_a_file() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for words in ("one", "two"):
            write_atomically(Path(folder, "page.html"), words)
        assert Path(folder, "page.html").read_text("utf-8") == "two"


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(UsageError, match="output-unwritable"):
        write_atomically(tmp_path / "a", "words")
    for path in (tmp_path / "a", tmp_path / ("x" * 300), tmp_path / "no" / "x"):
        with pytest.raises(UsageError, match="output-nowhere"):
            refuse_unwritable("-o", path)
    (tmp_path / "link").symlink_to(tmp_path / "no" / "x")
    with pytest.raises(UsageError, match=r"the folder .*no does not exist"):
        refuse_unwritable("-o", tmp_path / "link")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Name a file in a folder") as caught:
        write_atomically(tmp_path / "no" / "page.html", "words")
    assert caught.value.data["path"].endswith("page.html")
