"""Setup of every test: one thread, no network, a fixed hypothesis profile, golden traces."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from support.real_models import model_file
from support.taken_out import TAKEN_OUT, WHY

from arbor import Solver
from arbor.errors import UnknownName
from arbor.model.checkpoint import Checkpoint
from arbor.registry import register

torch.set_num_threads(1)

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", deadline=None, max_examples=300)
# scripts/mutate.py needs no smallest example
settings.register_profile(
    "mutants", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

FOLDER = tempfile.TemporaryDirectory(prefix="arbor-tests-")
os.environ["ARBOR_CACHE"] = FOLDER.name  # searches outside a test learn nothing for the user

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
# what imports a folder that was taken out belongs to it
FEATURE = re.compile(r"^from arbor\.((?:papers|integrations)\.\w+)", re.MULTILINE)
collect_ignore = [
    str(path)
    for path in TESTS.rglob("test_*.py")
    for folder in {*FEATURE.findall(path.read_text(encoding="utf-8"))}
    if not TESTS.parent.joinpath("arbor", *folder.split(".")).is_dir()
]
SLOW_TIMEOUT_S = 900


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-part",
        metavar="K/N",
        help="of the slow tests the K-th of N parts, counted from 0; which one a test is in "
        "depends on its name only",
    )
    parser.addoption(
        "--rewrite-golden", action="store_true", help="write tests/golden instead of comparing"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the part of the slow tests that was asked for, and give them a longer time limit."""
    if (asked := config.getoption("slow_part")) is not None:
        items[:] = [each for each in items if runs_in(asked, each)]
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


def runs_in(part: str, item: pytest.Item) -> bool:
    """Whether a test is not slow, or in the K-th of N parts (K/N)."""
    if not item.get_closest_marker("slow"):
        return True
    asked, parts = map(int, part.split("/"))
    assert 0 <= asked < parts, f"--slow-part {part}: the first number is below the second"
    return crc32(item.nodeid.encode()) % parts == asked


@pytest.fixture(autouse=True)
def names_are_given_back() -> Iterator[None]:
    """A name that a test registers is unknown to the next test."""
    before = {kind: dict(named) for kind, named in register._named.items()}
    yield
    register._named.clear()
    register._named.update(before)


@pytest.fixture(autouse=True)
def nothing_is_learned_from_other_tests(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Every test has a cache folder of its own, made when something is kept in it."""
    name = hashlib.blake2b(request.node.nodeid.encode(), digest_size=8).hexdigest()
    monkeypatch.setenv("ARBOR_CACHE", str(Path(FOLDER.name) / name))


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Any]:
    """Run ``arbor`` in this process, in an empty folder, with the fake solver."""
    from support import fake_solver
    from support.run_cli import in_process

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "arbor.solver", None)
    fake_solver.install()
    return in_process(capsys)


def difference(kept: Any, made: Any, where: str = "") -> str | None:
    """The first place where two JSON values differ; floats may differ by a thousandth."""
    if isinstance(kept, float) and isinstance(made, float):
        return (
            None if made == pytest.approx(kept, rel=1e-3, abs=1e-4) else f"{where}: {kept}, {made}"
        )
    if isinstance(kept, dict) and isinstance(made, dict) and kept.keys() == made.keys():
        pairs = [(f"{where}.{key}", kept[key], made[key]) for key in kept]
    elif isinstance(kept, list) and isinstance(made, list) and len(kept) == len(made):
        pairs = [(f"{where}[{i}]", kept[i], made[i]) for i in range(len(kept))]
    else:
        return None if kept == made else f"{where}: {kept}, {made}"
    found = (difference(old, new, place) for place, old, new in pairs)
    return next((each for each in found if each), None)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, Path], None]:
    """``golden(name, trace)`` compares a trace's canonical form with ``tests/golden``."""
    from arbor.trace import canonical, read_trace

    def compare(name: str, trace: Path) -> None:
        made = canonical(read_trace(trace))
        path = GOLDEN / f"{name}.arbor.jsonl"
        if request.config.getoption("--rewrite-golden"):
            GOLDEN.mkdir(exist_ok=True)
            path.write_text("".join(f"{line}\n" for line in made), encoding="utf-8")
            return
        assert path.is_file(), f"{path.name} is missing: run `make golden` and review it"
        kept = path.read_text(encoding="utf-8").splitlines()
        for number, (old, new) in enumerate(zip(kept, made, strict=False)):
            changed = difference(json.loads(old), json.loads(new))
            assert changed is None, f"event {number} of {name}{changed}"
        assert len(kept) == len(made), f"{name} has {len(made)} events, it had {len(kept)}"

    return compare


@pytest.fixture
def loaded_once(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Solvers of the built-in model, and of SmolLM2, share what one of them has loaded."""
    from support import loaded_once

    if "loads_itself" not in request.fixturenames:
        loaded_once.install(monkeypatch)


@pytest.fixture
def loads_itself() -> None:
    """For a test about loading in a file that asks for ``loaded_once``."""


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    """The built-in model, loaded once for a file of tests."""
    with Solver() as first:
        first.load()
        yield first.checkpoint


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as GGUF: the pretrained model of the default tests."""
    return model_file("smollm2")


@pytest.fixture(scope="session")
def qwen_small() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct as GGUF, for slow tests."""
    return model_file("qwen-small")


@pytest.fixture(scope="session")
def qwen() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct as GGUF, for slow tests."""
    return model_file("qwen")


@pytest.fixture(scope="session")
def gemma() -> Path:
    """Gemma 3 270M, a base model, as GGUF, for slow tests."""
    return model_file("gemma")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that names what a folder adds belongs to it, and is skipped where that was taken
    out."""
    try:
        return (yield)
    except UnknownName:
        if not TAKEN_OUT:
            raise
        pytest.skip(WHY)
