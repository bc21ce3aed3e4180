"""Warm starts: the KV of prompts outlives a run, comes back bit for bit, or is computed again."""

from __future__ import annotations

import functools
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import build
from support.slow_cases import every
from support.trees import Lab
from test_prefix_sharing import growth, opened, run

from arbor import Solver
from arbor.controllers.tot import ToT
from arbor.engine import scheduler
from arbor.events import Event, Shared
from arbor.forest import LEAST_COMMON
from arbor.kernels.native import native_library
from arbor.memory.prompt_files import BLOCK, HEADER, PromptFiles
from arbor.metrics import MetricsFold
from arbor.model import model_identity
from arbor.model.loading import locate_model
from arbor.trace.fold import Replay
from arbor.tree import ThoughtTree

pytestmark = pytest.mark.usefixtures("loaded_once")

ONE, OTHER = "1" * 32, "2" * 32
NUMBERS = 6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONG = np.array([(7 * i * i + 3 * i) % 90 for i in range(3 * BLOCK + 5)], np.int64)
GIB = 1 << 30


def files_in(folder: Path, identity: str = ONE, limit: int = GIB) -> PromptFiles:
    return PromptFiles(folder, identity, limit)


def rows_for(tokens: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """KV of a prompt: any bits, NaN and infinities included."""
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    bits = torch.randint(0, 256, (len(tokens), NUMBERS * dtype.itemsize), generator=generator)
    return bits.to(torch.uint8).view(dtype)


def save(files: PromptFiles, tokens: np.ndarray, dtype: torch.dtype = torch.float32) -> None:
    rows = rows_for(tokens, dtype)
    files.save(tokens, NUMBERS * dtype.itemsize, lambda offsets: rows[torch.from_numpy(offsets)])


def load(
    files: PromptFiles, tokens: np.ndarray, dtype: torch.dtype = torch.float32, first: int = 0
) -> dict[int, bytes]:
    """What comes back of a prompt, by token."""
    offsets = np.arange(first, files.find(tokens))
    return {
        int(offset): bits(row)
        for here, rows in files.load(tokens, offsets, NUMBERS, dtype)
        for offset, row in zip(here, rows, strict=True)
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def entries(folder: Path) -> list[Path]:
    """Files with KV, those used last first."""
    return sorted(folder.rglob("*.kv"), key=lambda path: -path.stat().st_mtime_ns)


def another(tokens: np.ndarray, at: int) -> np.ndarray:
    """A prompt that differs from one token on."""
    changed = tokens.copy()
    changed[at] += 1
    return changed


# Files


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_loaded_is_what_was_saved_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    save(files_in(tmp_path), LONG, dtype)
    rows = rows_for(LONG, dtype)

    for first in (0, BLOCK - 1, BLOCK + 3):
        back = load(files_in(tmp_path), LONG, dtype, first)
        assert back == {at: bits(rows[at]) for at in range(first, 3 * BLOCK)}


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-1],
    "header alone": lambda data: data[: HEADER.size],
    "longer": lambda data: data + b"\0",
    "another format": lambda data: b"X" + data[1:],
    "another key": lambda data: data[:9] + bytes([data[9] ^ 1]) + data[10:],
    "another checksum": lambda data: data[:25] + bytes([data[25] ^ 1]) + data[26:],
    "first bit": lambda data: data[:32] + bytes([data[32] ^ 128]) + data[33:],
    "last bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "text": lambda data: b"hello",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_deleted_and_reported_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(files_in(tmp_path), LONG)
    second = entries(tmp_path)[1]
    second.write_bytes(DAMAGE[kind](second.read_bytes()))
    files = files_in(tmp_path)

    with caplog.at_level(logging.WARNING):
        back = load(files, LONG)

    assert sorted(back) == [*range(BLOCK), *range(2 * BLOCK, 3 * BLOCK)]
    assert not second.exists()
    (line,) = caplog.messages
    assert line.startswith("1 damaged file(s)") and second.name in line
    assert files.find(LONG) == BLOCK
    save(files, LONG)
    assert len(load(files, LONG)) == 3 * BLOCK


# Folders that fail


def test_what_is_no_file_ends_its_own_prompt_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(files_in(tmp_path / "first"), LONG)
    second = entries(tmp_path / "first")[1].name  # of the prompt's files
    (tmp_path / "again" / ONE / second).mkdir(parents=True)
    files = files_in(tmp_path / "again", limit=6 * (HEADER.size + 4 * BLOCK * NUMBERS))
    others = [another(LONG, 0), another(another(LONG, 0), 0)]

    for prompt in (LONG, LONG, *others):
        save(files, prompt)

    assert files.find(LONG) in (0, BLOCK)
    assert [files.find(each) for each in others] == [3 * BLOCK] * 2, "there is room for two"
    assert [each.name for each in tmp_path.rglob("*.kv") if each.is_dir()] == [second]
    assert len(caplog.messages) == 1 and second in caplog.text


def test_what_is_no_folder_of_a_model_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / ("b" * 32)
    foreign.write_text("no folder")

    save(files_in(tmp_path), LONG)

    assert files_in(tmp_path).find(LONG) == 3 * BLOCK
    assert foreign.read_text() == "no folder"


def test_a_smaller_limit_holds_for_a_folder_that_is_larger(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    save(files_in(kept), LONG)
    save(files_in(kept, OTHER), LONG)
    size = entries(kept)[0].stat().st_size

    save(files_in(kept, limit=2 * size), LONG)  # nothing of it is missing
    assert len(entries(kept)) == 2 and files_in(kept).find(LONG) == 2 * BLOCK

    save(files_in(kept, limit=size), LONG[:5])  # a prompt too short to be kept
    assert len(entries(kept)) == 1 and files_in(kept).find(LONG) == BLOCK

    save(files_in(tmp_path / "none"), LONG[:5])
    assert not (tmp_path / "none").exists()


# Engines

EXAMPLES = tuple(int(token) + 5 for token in LONG[: 2 * BLOCK + 8])
FIRST, SECOND = (*EXAMPLES, 9, 3), (*EXAMPLES, 60, 2, 71)
COMMON = 2 * BLOCK


def lab_with(folder: Path, **settings: Any) -> Lab:
    return Lab(build("llama"), debug=True, prompts=files_in(folder), **settings)


def is_consistent(lab: Lab) -> None:
    """The account of the slots adds up, within the budget."""
    assert lab.memory.used <= lab.memory.peak <= lab.memory.slots
    lab.memory.check()


def loaded(lab: Lab) -> int:
    fold = MetricsFold()
    for event in lab.events:
        fold(event)
    return fold.metrics().tokens_loaded


def kv_of(lab: Lab, tree: ThoughtTree) -> torch.Tensor:
    return lab.memory.pool.gather(tree.root.span.slot)


def test_what_the_device_holds_is_not_loaded(tmp_path: Path) -> None:
    lab = lab_with(tmp_path)
    lab.plant(prompt=FIRST)
    lab.plant(prompt=SECOND)
    assert loaded(lab) == 0
    assert lab.rows() == len(FIRST) + len(SECOND) - len(EXAMPLES)


@pytest.mark.parametrize("share", ["exact", "off"])
def test_prompts_that_begin_together_load_their_common_part_once(
    share: Any, tmp_path: Path
) -> None:
    lab_with(tmp_path).plant(prompt=FIRST)
    alone = 2 * len(EXAMPLES) + 5
    pool = alone if share == "off" else alone - len(EXAMPLES)  # not one slot to spare
    lab = lab_with(tmp_path, share=share)
    trees = opened(lab, FIRST, SECOND, pool=pool)
    operations = [lab.begin_extend(tree.root) for tree in trees]
    run(lab)
    for operation in operations:
        operation.result()

    sources = [event.source for event in lab.events if isinstance(event, Shared)]
    if share == "off":
        assert loaded(lab) == 2 * COMMON and sources == ["file", "file"]
        assert lab.rows() == alone - 2 * COMMON
    else:
        assert loaded(lab) == COMMON and sorted(sources) == ["device", "device", "file"]
        assert lab.rows() == pool - COMMON
    for tree in trees:
        assert tree.root.span.exact.all()
    is_consistent(lab)


@settings(max_examples=30, deadline=None)
@given(
    kept=st.lists(st.integers(0, 5), max_size=3),
    opened_now=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    harm=st.lists(st.tuples(st.integers(0, 8), st.sampled_from(["gone", "damaged"])), max_size=4),
    most=st.sampled_from([17, 50, 8192]),
    spare=st.sampled_from([0, 0, 13]),
    first=st.integers(0, 2),
)
def test_any_prompts_over_any_files_fit_their_least_room_and_are_exact(
    kept: list[int],
    opened_now: list[int],
    harm: list[tuple[int, str]],
    most: int,
    spare: int,
    first: int,
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        folder = Path(name)
        for each in kept:
            lab_with(folder).plant(prompt=FAMILY[each])
        files = entries(folder)
        for place, kind in harm:
            if place < len(files):
                files[place].unlink(missing_ok=True)
                if kind == "damaged":
                    files[place].write_bytes(b"?" * 100)
        patched.setattr(scheduler, "MOST_NEW", most)
        chosen = [FAMILY[each] for each in opened_now]
        lab = lab_with(folder)
        trees = opened(lab, *chosen, pool=least_room(chosen) + spare)
        for some in (trees[:first], trees[first:]):
            operations = [lab.begin_extend(tree.root) for tree in some]
            run(lab)
            for operation in operations:
                operation.result()
        for tree, each in zip(trees, opened_now, strict=True):
            assert tree.root.span.exact.all()
            assert torch.allclose(kv_of(lab, tree), cold_kv(each), rtol=1e-4, atol=1e-5)
        lab.memory.check()
        assert lab.memory.used == least_room(chosen)


START = tuple(int(token) + 5 for token in LONG)
FAMILY = (
    START[:70],
    START[:64],
    START[:33],
    (*START[:40], *START[:50]),
    (*START[:70], 3, 4, 5),
    START[20:60],
)


def least_room(chosen: Sequence[tuple[int, ...]]) -> int:
    """Slots of prompts that share their beginnings of at least `LEAST_COMMON` tokens."""
    total = 0
    for place, prompt in enumerate(chosen):
        common = [beginning(prompt, other) for other in chosen[:place]]
        total += len(prompt) - max((c for c in common if c >= LEAST_COMMON), default=0)
    return total


def beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two prompts begin with alike."""
    alike = (a == b for a, b in zip(one, other, strict=False))
    return next((at for at, same in enumerate(alike) if not same), min(len(one), len(other)))


@functools.cache
def cold_kv(each: int) -> torch.Tensor:
    """KV of a prompt that nothing was loaded for."""
    lab = Lab(build("llama"))
    return kv_of(lab, lab.plant(prompt=FAMILY[each]))


def test_a_search_evicts_what_was_loaded_and_computes_it_again(tmp_path: Path) -> None:
    lab_with(tmp_path).plant(prompt=FIRST)
    small = len(FIRST) + 8
    lab, cold = lab_with(tmp_path), Lab(build("llama"))
    grown = []
    for each in (lab, cold):
        tree = each.plant(small, FIRST)
        leaves = each.grow([(tree.root, 3)], growth())
        grown.append([leaf.tokens for leaf in leaves])
    assert grown[0] == grown[1] and loaded(lab) == COMMON
    is_consistent(lab)


# Identities


def sapling(folder: Path) -> Path:
    """A copy of the built-in model's directory."""
    source = Path(locate_model("builtin:sapling").path)
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix in (".json", ".safetensors"):
            shutil.copy(path, folder)
    return folder


def test_a_model_is_identified_by_its_weights_and_settings(tmp_path: Path) -> None:
    folder = sapling(tmp_path / "model")
    of = model_identity.model_identity
    first = of(locate_model(folder))
    assert first is not None
    assert of(locate_model(sapling(tmp_path / "copy"))) == first

    (weights,) = folder.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert (second := of(locate_model(folder))) != first
    config = folder / "config.json"
    config.write_text(config.read_text("utf-8").replace("{", '{"rope_theta": 7,', 1), "utf-8")
    assert of(locate_model(folder)) not in (first, second)


# Solvers

PROBLEM = (
    "Alice has 12 apples and gives 3 of them to Bob, who has 5 apples of his own already, and then "
    "buys {} more at the market. How many apples do the two of them have now?"
)
SMALL = ToT(beam=2, width=2)


def solver_with(folder: Path | None, **settings: Any) -> Solver:
    given: dict[str, Any] = {"task": "reasoning", "controller": SMALL, "debug": True}
    given |= {"max_depth": 2, "step_tokens": 8}
    return Solver(**given | {"keep_kv": folder} | settings)


def solved(
    folder: Path | None, more: int = 7, **settings: Any
) -> tuple[Any, list[Any], list[Event]]:
    """A solution, its tree and its events, with the trace checked."""
    heard: list[Event] = []
    with solver_with(folder, listeners=(heard.append,), **settings) as solver:
        solution = solver.solve(PROBLEM.format(more))
        tree = [(node.tokens, node.value, node.logprob) for node in solver.engine.tree]
    replay = Replay()
    for event in heard:
        replay(event)
    assert replay.problems == []
    return solution, tree, heard


@pytest.mark.skipif(native_library() is None, reason="the library is not built")
def test_kv_of_other_instructions_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved(tmp_path, deterministic=True)
    same, _, _ = solved(tmp_path, deterministic=True)
    monkeypatch.setattr(native_library(), "name", "of another processor")
    other, _, _ = solved(tmp_path, deterministic=True)

    assert same.metrics.tokens_loaded > 0
    assert "tokens_loaded" not in other.metrics.to_dict()


@pytest.mark.parametrize("dtype", every(2, ["float32", "bfloat16"]))
def test_a_warm_search_is_the_cold_one_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "deterministic": True}
    _, cold, _ = solved(None, **settings)
    first, kept, _ = solved(tmp_path, **settings)
    warm, tree, heard = solved(tmp_path, **settings)
    assert tree == kept == cold
    assert "tokens_loaded" not in first.metrics.to_dict()
    assert warm.metrics.tokens_prefilled == first.metrics.tokens_prefilled
    part = warm.metrics.tokens_loaded
    assert part >= warm.metrics.tokens_prefilled - BLOCK
    assert warm.metrics.rows == first.metrics.rows - part
    (shared,) = (event for event in heard if isinstance(event, Shared))
    assert shared.source == "file" and shared.nodes == ((0, part),)

    _, changed, _ = solved(None, 8, **settings)
    later, tree, _ = solved(tmp_path, 8, **settings)
    assert tree == changed
    assert BLOCK <= later.metrics.tokens_loaded < part, "only what both begin with"
