"""Files that are cut into pieces, kept one at a time and joined."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.append(str(SCRIPTS))

from gpu_pieces import LIST, PiecesError, cut, keep, transfers  # noqa: E402


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.gguf"
    path.write_bytes(bytes(range(256)) * 40)
    return path


def test_pieces_of_any_order_make_the_file(weights: Path, tmp_path: Path) -> None:
    out, into = tmp_path / "pieces", tmp_path / "there"
    pieces = cut([weights], out, 3000)
    assert len(pieces) == 4
    assert all((out / each.name).stat().st_size <= 3000 for each in pieces)
    left = [len(keep(out / each.name, into)) for each in reversed(pieces)]
    assert left == [3, 2, 1, 0]
    assert (into / "weights.gguf").read_bytes() == weights.read_bytes()
    assert [path.name for path in into.iterdir()] == ["weights.gguf"]
    assert keep(out / pieces[0].name, into) == []  # once more: it is there


def test_pieces_that_fit_one_transfer_go_together(weights: Path, tmp_path: Path) -> None:
    data = tmp_path / "problems.jsonl"
    data.write_text("{}\n")
    out = tmp_path / "pieces"
    together = transfers(cut([weights, data], out, 3000), out, 3000)
    parts = [f"weights.gguf.part{number:02}" for number in range(4)]
    names = [[each.name for each in some] for some in together]
    assert names == [*([part] for part in parts[:3]), [parts[3], "problems.jsonl.part00"]]


def test_a_small_file_is_one_piece(tmp_path: Path) -> None:
    data = tmp_path / "problems.jsonl"
    data.write_text("{}\n")
    (piece,) = cut([data], tmp_path / "pieces", 3000)
    assert keep(tmp_path / "pieces" / piece.name, tmp_path / "there") == []
    assert (tmp_path / "there" / "problems.jsonl").read_text() == "{}\n"


def test_a_changed_piece_is_refused(weights: Path, tmp_path: Path) -> None:
    out, into = tmp_path / "pieces", tmp_path / "there"
    first, *_ = cut([weights], out, 3000)
    (out / first.name).write_bytes(b"x" * 3000)
    with pytest.raises(PiecesError, match=r"part00 is not as it was cut: send it again"):
        keep(out / first.name, into)
    assert not into.exists()


def test_a_piece_that_broke_where_it_was_kept_does_not_make_a_file(
    weights: Path, tmp_path: Path
) -> None:
    out, into = tmp_path / "pieces", tmp_path / "there"
    first, *others = cut([weights], out, 3000)
    keep(out / first.name, into)
    (into / first.name).write_bytes(b"x" * 3000)
    with pytest.raises(PiecesError, match="send all of its pieces again"):
        for each in others:
            keep(out / each.name, into)
    assert not list(into.iterdir())


def test_the_command_cuts_keeps_and_names_what_is_wrong(weights: Path, tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPTS / "gpu_bundle.py"), *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    problems = tmp_path / "problems.jsonl"
    problems.write_text("{}\n")
    done = run("--cut", str(weights), str(problems), "--out", "pieces", "--limit-mib", "64")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pieces" / LIST).is_file()
    _, command = done.stdout.splitlines()  # both fit one transfer
    words = command.split()[3:-2]
    assert words == ["--keep", "pieces/weights.gguf.part00", "pieces/problems.jsonl.part00"]
    done = run(*words, "--into", "there")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "weights.gguf.part00: complete\nproblems.jsonl.part00: complete\n"
    assert (tmp_path / "there" / "weights.gguf").read_bytes() == weights.read_bytes()
    done = run("--cut", "nothing.gguf", "--out", "pieces")
    assert done.returncode == 1
    assert done.stderr == "gpu_bundle: nothing.gguf: no such file\n"
