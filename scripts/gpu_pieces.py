"""Files cut into pieces that a machine takes one at a time, and joined there (gpu_bundle.py)."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

LIST = "pieces.json"
CHUNK = 1 << 22  # bytes read at a time


class PiecesError(Exception):
    """What is wrong with a piece, and what to do."""


@dataclass(frozen=True)
class Piece:
    """A part of a file.

    Attributes:
        name: of the piece.
        file: of which it is a part.
        sha256: of the piece.
        whole: sha256 of the file.
    """

    name: str
    file: str
    sha256: str
    whole: str


def cut(files: Sequence[Path], out: Path, size: int) -> list[Piece]:
    """Write the pieces of files, and their list.

    Args:
        files: of distinct names.
        out: folder; what lay there goes.
        size: bytes of a piece, at most.

    Raises:
        PiecesError: two files of one name, one that is not there, or no room in a piece.
    """
    if size < 1:
        raise PiecesError("a piece would have no room: raise --limit-mib")
    if len({path.name for path in files}) < len(files):
        raise PiecesError("two files have one name: rename one")
    for path in files:
        if not path.is_file():
            raise PiecesError(f"{path}: no such file")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    pieces = []
    for path in files:
        whole = sha256(path)
        with path.open("rb") as source:
            for number in range(max(1, -(-path.stat().st_size // size))):
                name = f"{path.name}.part{number:02}"
                with (out / name).open("wb") as piece:
                    for chunk in _chunks(source, size):
                        piece.write(chunk)
                pieces.append(Piece(name, path.name, sha256(out / name), whole))
    text = json.dumps([asdict(each) for each in pieces], indent=1) + "\n"
    (out / LIST).write_text(text, encoding="utf-8")
    return pieces


def transfers(pieces: Sequence[Piece], out: Path, size: int) -> list[list[Piece]]:
    """Pieces that go together, in order: as many as come to `size` bytes."""
    found: list[list[Piece]] = []
    used = size
    for piece in pieces:
        own = (out / piece.name).stat().st_size
        if used + own > size:
            found.append([])
            used = 0
        found[-1].append(piece)
        used += own
    return found


def keep(path: Path, into: Path) -> list[Piece]:
    """Check a piece, keep it in a folder, and join its file once all of its pieces are there.

    Args:
        path: of the piece, with the list beside it.
        into: folder of the machine.

    Returns:
        The pieces of its file that are still to come.

    Raises:
        PiecesError: an unknown piece, or one that was changed on its way.
    """
    known = [Piece(**each) for each in json.loads((path.parent / LIST).read_text("utf-8"))]
    piece = next((each for each in known if each.name == path.name), None)
    if piece is None:
        raise PiecesError(f"{path.name} is not in {LIST}: cut the files again")
    mine = [each for each in known if each.file == piece.file]
    target = into / piece.file
    if target.is_file() and sha256(target) == piece.whole:
        return []
    if not path.is_file() or sha256(path) != piece.sha256:
        raise PiecesError(f"{path.name} is not as it was cut: send it again")
    into.mkdir(parents=True, exist_ok=True)
    half = into / f"{piece.name}.half"
    shutil.copyfile(path, half)
    half.rename(into / piece.name)
    missing = [each for each in mine if not (into / each.name).is_file()]
    if not missing:
        _join(mine, into, target)
    return missing


def _join(pieces: Sequence[Piece], into: Path, target: Path) -> None:
    half = target.with_name(target.name + ".half")
    with half.open("wb") as whole:
        for each in pieces:
            with (into / each.name).open("rb") as source:
                shutil.copyfileobj(source, whole, CHUNK)
    if sha256(half) != pieces[0].whole:
        half.unlink()
        for each in pieces:
            (into / each.name).unlink()
        raise PiecesError(f"{target.name} is not as it was cut: send all of its pieces again")
    half.rename(target)
    for each in pieces:
        (into / each.name).unlink()


def _chunks(source: BinaryIO, most: int) -> Iterator[bytes]:
    left = most
    while left > 0 and (chunk := source.read(min(CHUNK, left))):
        left -= len(chunk)
        yield chunk


def sha256(path: Path) -> str:
    """Of a file, in hexadecimal."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
