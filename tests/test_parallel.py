"""Tensor parallelism: two processes that hold a model together search as one does."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.models import ARCHITECTURES, config_of, random_model
from support.rank_searches import search, start, trace_of

from arbor import Solver
from arbor.errors import ModelError, UsageError
from arbor.events import Boundary, Ended, Verified
from arbor.model.loading import BUILTIN
from arbor.trace.read import read_trace

SEARCHES: list[dict[str, Any]] = [
    {"controller": "beam,beam_size=2,width=2", "budget": 0.3},
    {"controller": "beam,beam_size=3", "mode": "lossy", "budget": 0.3},
]
MORE_SEARCHES: list[dict[str, Any]] = [
    {"budget": 0.25, "debug": True},
    {"controller": "mcts,simulations=6", "budget": 0.3},
    {"controller": "best-first", "budget": 0.3},
    {"controller": "rebase,width=4", "sampling": {"temperature": 1.0}},
]
# what transformers has a plan for, and whose logits are the model's own on two ranks
DIVIDED = (
    "llama",
    "llama_mha",
    "llama_yarn",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "olmo2",
    "smollm3",
    "cohere",
    "starcoder2",
)


def save(folder: Path, name: str) -> Path:
    """A small random model of an architecture with the built-in model's tokenizer."""
    model_type, settings = ARCHITECTURES[name]
    more = {"vocab_size": 640, "max_position_embeddings": 2048}
    random_model(config_of(model_type, **{**settings, **more})).save_pretrained(folder)
    for file in BUILTIN["sapling"].glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def tree_of(path: Path) -> list[tuple[Any, ...]]:
    """Every block of a trace: its tokens, and why it ends."""
    events = read_trace(path).events
    return [(each.node, each.ids, each.stop) for each in events if isinstance(each, Boundary)]


def assert_same(cases: Sequence[Mapping[str, Any]], tmp_path: Path) -> None:
    """Two ranks search each case block by block as this process does."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    ranks = start(cases, two)
    ended = [each.communicate(timeout=100) for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], ended
    search(cases, one, 1)
    for number, case in enumerate(cases):
        alone, together = (read_trace(trace_of(each, number)) for each in (one, two))
        blocks = tree_of(trace_of(one, number))
        assert blocks, case
        assert tree_of(trace_of(two, number)) == blocks, case
        for mine, other in zip(alone.events, together.events, strict=True):
            assert type(mine) is type(other)
            if isinstance(mine, Verified) and isinstance(other, Verified):
                assert mine.values == pytest.approx(other.values, abs=1e-4)


def test_two_ranks_search_as_one_process(tmp_path: Path) -> None:
    assert_same(SEARCHES, tmp_path)


@pytest.mark.slow
def test_two_ranks_search_in_every_way_as_one_process(tmp_path: Path) -> None:
    assert_same(MORE_SEARCHES, tmp_path)


@pytest.mark.slow
def test_trees_of_architectures_are_the_same(tmp_path: Path) -> None:
    models = [str(save(tmp_path / name, name)) for name in DIVIDED]
    case = {"path_tokens": 60, "step_tokens": 15, "budget": 0.3, "controller": "beam,beam_size=2"}
    assert_same([{"model": model, "task": "game24", **case} for model in models], tmp_path)


@pytest.mark.parametrize(
    "die_at",
    [20, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 3, 5, 9, 14, 27, 33, 41))],
)
def test_a_rank_that_dies_ends_the_other_with_its_trace_kept(tmp_path: Path, die_at: int) -> None:
    first, second = start([{}], tmp_path, die_at=die_at)
    _, dead = second.communicate(timeout=60)
    began = time.monotonic()
    _, said = first.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert second.returncode == -9, dead
    assert first.returncode == 8
    assert said.count("[rank-lost]") == 1
    assert "Traceback" not in said
    events = read_trace(trace_of(tmp_path, 0)).events
    assert isinstance(events[-1], Ended)
    assert events[-1].status == "error"


@pytest.mark.slow
def test_a_rank_that_stands_still_ends_the_other(tmp_path: Path) -> None:
    first, second = start([{}], tmp_path, die_at=-9)
    try:
        _, said = first.communicate(timeout=110)
    finally:
        second.kill()
        second.communicate()
    assert first.returncode == 8
    assert said.count("[rank-lost]") == 1


def test_ranks_that_differ_end_before_they_compute(tmp_path: Path) -> None:
    ranks = start([{"seeds": [1, 2]}], tmp_path)
    said = [each.communicate(timeout=60)[1] for each in ranks]
    assert 8 in [each.returncode for each in ranks]
    assert "[ranks-differ]" in "".join(said)


def _as_rank(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(count))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"weights": "int8"}, "weights=int8"),
        ({"kv_dtype": "int8"}, "kv_dtype=int8"),
        ({"deterministic": True}, "deterministic"),
        ({"host": "1MiB"}, "host"),
        ({"policy": "snapkv", "mode": "lossy"}, "observes attention"),
        ({"device": "auto"}, "device=auto"),
    ],
)
def test_what_runs_on_one_process_only_is_refused_by_name(
    settings: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_rank(monkeypatch, 2)
    with pytest.raises(UsageError, match=named) as refused:
        Solver(tp=2, **{"device": "cpu", **settings})
    assert refused.value.code == "tp"
    assert refused.value.hint


def test_processes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="torchrun --nproc-per-node 2"):
        Solver(tp=2, device="cpu")
    _as_rank(monkeypatch, 3)
    with pytest.raises(UsageError, match="one of 3 processes"):
        Solver(tp=2, device="cpu")


def test_streams_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_rank(monkeypatch, 2)
    with pytest.raises(UsageError, match="stream of searches"):
        Solver(tp=2, device="cpu").stream("4 5 6 10")


def test_heads_that_do_not_divide_are_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _as_rank(monkeypatch, 3)
    with pytest.raises(ModelError, match="do not divide by 3") as refused:
        Solver(tp=3, device="cpu").plan("4 5 6 10")
    assert refused.value.hint == "Use tp=2."


def test_a_plan_counts_the_bytes_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Solver(device="cpu").plan("4 5 6 10")
    _as_rank(monkeypatch, 2)
    part = Solver(tp=2, device="cpu").plan("4 5 6 10")
    assert part.full_tokens == whole.full_tokens
    assert part.bytes_per_token * 2 == whole.bytes_per_token


def test_an_architecture_without_a_plan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(tmp_path / "opt", "opt")
    _as_rank(monkeypatch, 2)
    with pytest.raises(ModelError, match="no plan that divides model_type 'opt'"):
        Solver(model, tp=2, device="cpu").plan("4 5 6 10")
