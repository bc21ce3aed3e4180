"""Tensor parallelism: two processes that hold a model together search as one does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.models import ARCHITECTURES, config_of
from support.two_ranks import PROBLEM, TWO, assert_same, save

from arbor import Solver
from arbor.errors import ArborError, ModelError, UsageError
from arbor.events import Event, Forwarded
from arbor.measure.cluster import check_workers
from arbor.model.parallel.shards import cuts, division_of

SEARCHES: list[dict[str, Any]] = [
    {"controller": "beam,beam_size=2,width=2", "budget": 0.3, "debug": True},
    {"mode": "lossy", "budget": 0.3, "policy": "expected"},  # asks how positions are encoded
]
MORE_SEARCHES: list[dict[str, Any]] = [
    {"controller": "beam,beam_size=3", "mode": "lossy", "budget": 0.3},
    {"controller": "beam,beam_size=2", "mode": "lossy", "budget": 0.3, "policy": "snapkv"},
    {"controller": "mcts,simulations=6", "budget": 0.3},
    {"controller": "best-first", "budget": 0.3},
    {"controller": "rebase,width=4", "sampling": {"temperature": 1.0}},
    {"mode": "lossy", "budget": 0.3, "policy": "h2o"},
    {"mode": "lossy", "budget": 0.3, "policy": "tova"},
    {"mode": "lossy", "budget": 0.3, "policy": "rkv"},
]


@pytest.fixture(scope="module")
def pair() -> Iterator[Solver]:
    """The built-in model on two processes."""
    with Solver(**TWO) as solver:
        solver.load()
        yield solver


def assert_searches(cases: Sequence[Mapping[str, Any]], pair: Solver, tmp_path: Path) -> None:
    for number, case in enumerate(cases):
        two = Solver(**TWO, **case)
        two.checkpoint = pair.checkpoint
        folder = tmp_path / str(number)
        folder.mkdir()
        assert_same(two, Solver(device="cpu", **case), folder)


def test_two_processes_search_as_one(pair: Solver, tmp_path: Path) -> None:
    assert_searches(SEARCHES, pair, tmp_path)


@pytest.mark.slow
def test_two_processes_search_in_every_way_as_one(pair: Solver, tmp_path: Path) -> None:
    assert_searches(MORE_SEARCHES, pair, tmp_path)


def test_a_plan_says_what_a_rank_has() -> None:
    def divided(count: int, heads: int, kv_heads: int) -> tuple[int, int, bool]:
        model_type, settings = ARCHITECTURES["llama"]
        sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
        sizes["hidden_size"] = 8 * heads
        found = division_of(config_of(model_type, **{**settings, **sizes}), count)
        return found.kv_heads_each, found.copies, found.attention

    assert divided(2, 4, 2) == (1, 1, True)
    assert divided(4, 8, 2) == (1, 2, True)
    assert divided(2, 9, 3) == (3, 1, False)


def test_cuts_are_between_blocks() -> None:
    assert cuts(4864, 2, 256) == [0, 2560, 4864]
    assert cuts(1536, 2, 32) == [0, 768, 1536]
    assert cuts(10, 3, 1) == [0, 4, 7, 10]


def test_the_parts_of_a_rank_are_fused(pair: Solver) -> None:
    alone = Solver(device="cpu")
    alone.load()
    fused, wanted = (
        Counter(type(each).__name__ for each in solver.engine.runner.model.modules())
        for solver in (pair, alone)
    )
    for kind in ("FusedLlamaRMSNorm", "FusedLlamaMLP", "FusedLlamaAttention"):
        assert fused[kind] == wanted[kind]


def test_streams_and_batches_run_together(pair: Solver) -> None:
    stream = pair.stream(PROBLEM, max_tokens=100)
    alone = Solver(device="cpu").solve(PROBLEM, max_tokens=100)
    assert stream.solution.answer == alone.answer
    both = pair.solve_batch([PROBLEM, "1 2 3 4"], max_tokens=100)
    assert both[0].answer == alone.answer


def test_a_stop_ends_the_search_and_not_the_processes(pair: Solver) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Forwarded):
            two.stop()

    two = Solver(**TWO, listeners=[stop])
    two.checkpoint = pair.checkpoint
    assert two.solve(PROBLEM).finish_reason == "interrupted"
    assert pair.solve(PROBLEM, max_tokens=50).finish_reason in ("limit", "solved")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"host": "1MiB"}, "KV in host memory"),
        ({"policy": "ams,granularity=head", "mode": "lossy"}, "tokens of their own"),
        ({"keep_kv": "1GiB"}, "keep_kv"),
        ({"verifier": "cgee,levels=both"}, "leaves between layers"),
    ],
)
def test_what_runs_on_one_process_only_is_refused_by_name(
    settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ArborError, match=named) as refused:
        Solver(**{**TWO, **settings})
    assert refused.value.code == "tp"
    assert refused.value.hint


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(UsageError, match="torchrun began this process") as refused:
        Solver(**TWO)
    assert "with python" in refused.value.hint


def test_workers_of_several_processes_on_gpus_are_refused() -> None:
    check_workers("exact", "cpu", 2)
    with pytest.raises(UsageError, match="of a worker hold a model on CPUs"):
        check_workers("exact", "cuda", 2)


def test_a_group_that_is_there_already_is_refused(pair: Solver) -> None:
    with pytest.raises(UsageError, match="is in a group of torch"):
        Solver(**TWO).load()


def test_a_plan_counts_the_bytes_of_one_rank() -> None:
    whole, part = (Solver(device="cpu", tp=tp).plan(PROBLEM) for tp in (1, 2))
    assert part.full_tokens == whole.full_tokens
    assert part.bytes_per_token * 2 == whole.bytes_per_token


def test_an_architecture_without_a_plan_is_refused(tmp_path: Path) -> None:
    model = save(tmp_path / "opt", "opt")
    with pytest.raises(ModelError, match="no plan that divides model_type 'opt'"):
        Solver(model, **TWO).plan(PROBLEM)
