"""A recorded search replayed without the model costs what it cost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.run_cli import in_process
from support.slow_cases import every

from arbor import Solver
from arbor.errors import BudgetInfeasible
from arbor.events import Boundary, Event
from arbor.measure import replay as replay_module
from arbor.measure.replay import RecordedSearch, replay, replay_smallest
from arbor.metrics import Metrics
from arbor.model.loading import BUILTIN
from arbor.run.listeners import StopSearch
from arbor.trace.fold import Replay
from arbor.trace.read import read_trace

pytestmark = pytest.mark.usefixtures("loaded_once")

TIMES = ("wall_s", "prefill_s", "decode_s", "verify_s", "rehydrate_s", "policy_s")
SEARCHES = (
    {"controller": {"name": "tot", "beam": 2, "width": 3}},
    {"controller": {"name": "tot", "strategy": "dfs", "width": 3, "max_visited": 6}},
    {"controller": {"name": "beam", "beam_size": 2, "width": 2}, "verifier": "exact"},
    {"controller": {"name": "mcts", "width": 3, "simulations": 8, "rollout": 1}},
    {"controller": {"name": "ab-mcts", "thoughts": 24}},
)


def counters(metrics: Metrics) -> dict[str, float]:
    """What does not depend on the clock or on the recorded header's budget."""
    kept = dataclasses.asdict(metrics)
    for name in (
        *TIMES,
        "budget_tokens",
        "bytes_per_token",
        "full_tokens",
        "smallest_tokens",
        "part",
    ):
        del kept[name]
    return kept


def live(search: dict[str, object], **settings: object) -> tuple[Metrics, list[Event]]:
    events: list[Event] = []
    with Solver(listeners=(events.append,), **search, **settings) as solver:
        return solver.solve("4 5 6 10").metrics, events


@pytest.fixture(scope="module")
def tokenizer() -> object:
    with Solver() as solver:
        solver.plan("4 5 6 10")
        return solver.tokenizer


@pytest.mark.parametrize("search", every(6, SEARCHES))
def test_a_replay_has_the_counters_of_a_run(search: dict[str, object], tokenizer: object) -> None:
    whole, events = live(search)
    record = RecordedSearch.of(events)

    assert counters(replay(record, tokenizer, policy="lru", slots=4096)) == counters(whole)

    slots = max(150, whole.peak_tokens // 4)
    for policy in ("lru", "reentry", "uniform"):
        run, _ = live(search, budget=f"{slots}tok", policy=policy)
        again = replay(record, tokenizer, policy=policy, slots=slots)
        assert counters(again) == counters(run)
        assert again.evicted_tokens > 0


@pytest.mark.parametrize("share", every(2, ["exact", "off"]))
def test_the_smallest_budget_is_found_near_the_longest_path(
    share: str, tokenizer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, events = live({"controller": "tot", "share": share})
    record = RecordedSearch.of(events)
    tried: list[int] = []

    def noted(*given: object, slots: int, **settings: object) -> Metrics:
        tried.append(slots)
        return replay(*given, slots=slots, **settings)

    monkeypatch.setattr(replay_module, "replay", noted)
    slots, _ = replay_smallest(record, tokenizer, slots=1, policy="lru")
    assert tried[-1] == slots and len(tried) < 5
    with pytest.raises(BudgetInfeasible):
        replay(record, tokenizer, slots=slots - 1, policy="lru")


def test_a_run_that_was_cut_short_is_replayed_up_to_its_last_whole_round(
    tokenizer: object,
) -> None:
    search: dict[str, object] = {"controller": {"name": "tot", "beam": 3, "width": 6}}
    events: list[Event] = []

    def stop_at(most: int) -> Callable[[Event], None]:
        """Ends the search in the middle of a round, once its closed blocks hold so many tokens."""

        def stop(event: Event) -> None:
            if most <= sum(len(each.ids) for each in events if isinstance(each, Boundary)):
                raise StopSearch

        return stop

    with Solver(**search) as solver:
        rounds = set()
        for most in (5, 40, 90, 200):
            events.clear()
            solver.listeners = (events.append, stop_at(most))
            solution = solver.solve("4 5 6 10")
            assert solution.finish_reason == "interrupted"
            cut = any(isinstance(e, Boundary) and e.stop == "limit" for e in events)
            again = replay(RecordedSearch.of(list(events)), tokenizer, policy="lru", slots=4096)
            rounds.add((cut, again.rounds))
            shorter = again.tokens_generated < solution.metrics.tokens_generated
            assert shorter == cut
    assert {(True, 0), (False, 1), (True, 1)} <= rounds


@pytest.mark.slow
def test_the_command_compares_policies_on_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.arbor.jsonl"
    with Solver(**SEARCHES[1]) as solver:
        peak = solver.solve("4 5 6 10", trace=path).metrics.peak_tokens
    run = in_process(capsys)
    shown = run(
        "replay", str(path), "--policy", "lru", "--policy", "belady", "--budget", "0.4", "--json"
    )
    rows = {row["policy"]: row for row in shown.document["rows"]}

    assert shown.code == 0
    assert rows["belady"]["recomputed"] <= rows["lru"]["recomputed"]
    assert rows["lru"]["peak_tokens"] <= rows["lru"]["budget_tokens"]
    assert rows["lru"]["budget_tokens"] == int(0.4 * peak)
    with Solver(budget="130tok", **SEARCHES[1]) as solver:  # recorded in a smaller one
        solver.solve("4 5 6 10", trace=tmp_path / "small.arbor.jsonl")
    small = run("replay", str(tmp_path / "small.arbor.jsonl"), "--budget", "0.4", "--json")
    assert small.document["rows"][0]["budget_tokens"] == int(0.4 * peak)
    table = run("replay", str(path), "--budget", "20tok", "--policy", "lru", "--json")
    needed = table.document["rows"][0]["needs"]
    for slots, works in ((needed - 1, False), (needed, True)):
        rows = run("replay", str(path), "--budget", f"{slots}tok", "--policy", "lru", "--json")
        assert ("recomputed" in rows.document["rows"][0]) is works
    assert f"needs {needed}" in run("replay", str(path), "--budget", "20tok").out
    both = ("--policy", "arborkv", "--policy", "arborkv,scorer=recency,tail=4")
    names = [row["policy"] for row in run("replay", str(path), *both, "--json").document["rows"]]
    assert names[:2] == ["arborkv", "arborkv,scorer=recency,tail=4"]
    moved = run("replay", str(path), "--model", str(tmp_path))
    assert (moved.code, "[model-incomplete]" in moved.err) == (5, True)
    assert run("replay", str(path), "--model", "").code == 5
    # of a revision of a Hub model that lies in a folder now
    hub = path.read_bytes().replace(b'"revision":null', b'"revision":"v1"')
    assert b'"revision":"v1"' in hub
    (tmp_path / "hub.jsonl").write_bytes(hub)
    local = ("--model", str(BUILTIN["sapling"]), "--policy", "lru", "--json")
    assert run("replay", str(tmp_path / "hub.jsonl"), *local).document["rows"]
    run("solve", "4 5 6 10", "--trace", str(tmp_path / "quiet.jsonl"), "--trace-text", "none")
    quiet = run("replay", str(tmp_path / "quiet.jsonl"))
    assert (quiet.code, "no words (--trace-text none)" in quiet.err) == (4, True)
    wrong = run("replay", str(path), "--policy", "lrv")
    assert wrong.code == 2
    assert "lru" in wrong.err


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (2**31, "block 2,147,483,648 opens where block 2 is the next"),
        (2**63 - 1, "block 9,223,372,036,854,775,807 opens where block 2 is the next"),
        (-5, "block -5 opens where block 2 is the next"),
        (7, "block 7 opens where block 2 is the next"),
    ],
)
def test_a_block_with_a_strange_id_is_one_error(
    node: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The id is strange everywhere in the trace, which is consistent otherwise."""
    trace = tmp_path / "run.arbor.jsonl"
    with Solver(controller="chain,samples=2", max_depth=2, max_expansions=2) as solver:
        solver.solve("4 5 6 10", trace=trace)
    records = [json.loads(line) for line in trace.read_bytes().splitlines()]
    for record in records:
        for name in ("node", "parent"):
            if record.get(name) == 2:
                record[name] = node
        for name in ("leaves", "previous", "nodes", "path"):
            if name in record and record["e"] != "end":
                record[name] = [
                    [node if each[0] == 2 else each[0], *each[1:]]
                    if isinstance(each, list)
                    else (node if each == 2 else each)
                    for each in record[name]
                ]
    trace.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    assert Replay.of(read_trace(trace)).problems == []

    code = in_process(capsys)("replay", str(trace), "--policy", "belady")

    assert code.code == 4
    assert code.err.startswith("arbor: error: [trace-replay] the trace is inconsistent: ")
    assert said in code.err and len(code.err.splitlines()) == 1
