"""``arbor bench``: what it runs, what it says, and what it refuses to say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import fake_solver
from support.run_cli import Arbor

from arbor.cli.bench import compare, parse_percentage, refuse_other_settings
from arbor.errors import UsageError


def test_every_budget_of_every_policy_is_solved_in_turn(command: Arbor) -> None:
    fake_solver.SOLVERS.clear()

    ran = command(
        *("bench", "--budget", "full", "--budget", "0.5", "--policy", "lru", "--policy", "h2o"),
        *("--warmup", "1", "--repeat", "4", "--json"),
    )

    rows = [(row["policy"], row["budget"]) for row in ran.document["rows"]]
    assert rows == [("lru", "full"), ("lru", "0.5"), ("h2o", "full"), ("h2o", "0.5")]
    for row in ran.document["rows"]:
        assert len(row["cpu_s"]["seconds"]) == len(row["wall_s"]["seconds"]) == 4
        assert row["answer"] == "(10 - 4) * 5 - 6" and row["peak_tokens"] > 0
    lru, h2o = fake_solver.SOLVERS
    assert sorted(lru.solved) == sorted(h2o.solved) == ["0.5"] * 5 + ["full"] * 5
    assert (ran.code, ran.document["clock"], ran.err) == (0, "cpu_s", "")


def test_a_table_says_no_more_than_the_noise_allows(command: Arbor) -> None:
    ran = command("bench", "--repeat", "3", "--budget", "full", "--budget", "1.0")

    head, first, second = ran.out.splitlines()
    assert "CPU s" in head and "against the first" in head
    assert "full" in first
    assert "no difference beyond the noise" in second or " times" in second


def timings(*seconds: float, budget: str = "full", **settings: Any) -> dict[str, Any]:
    spread = {"median": sorted(seconds)[len(seconds) // 2], "seconds": list(seconds)}
    row = {"policy": "lru", "budget": budget, "cpu_s": spread, "wall_s": spread}
    return {
        "schema": "arbor.bench/1",
        "settings": {"seed": 0} | settings,
        "clock": "cpu_s",
        "rows": [row],
    }


@pytest.mark.parametrize(
    ("now", "most", "slower"),
    [
        ((1.2,) * 3, 0.05, 1),
        ((1.2,) * 3, 0.5, 0),
        ((0.9, 1.2, 1.5), 0.05, 0),
        ((1.2,) * 3, None, 0),
    ],
)
def test_what_is_slower_than_allowed_is_reported(
    now: tuple[float, ...], most: float | None, slower: int
) -> None:
    found = timings(*now)

    slower_rows = compare(found, timings(1.0, 1.0, 1.0), most)

    assert len(slower_rows) == slower
    assert found["rows"][0]["before"]["median"] == 1.0
    if slower_rows:
        assert slower_rows[0] == "lru full: 1.2 s, it was 1 s (+20 %, allowed 5 %)."


def test_only_what_was_measured_alike_is_compared() -> None:
    arms = [("lru", "full"), ("h2o", "full")]

    with pytest.raises(UsageError, match="other settings: seed"):
        refuse_other_settings({"seed": 0}, arms, timings(1.0, 1.0, 1.0, seed=7), Path("b.json"))
    with pytest.raises(UsageError, match="other policies and budgets"):
        refuse_other_settings(
            {"seed": 0}, arms, timings(1.0, 1.0, 1.0, budget="0.5"), Path("b.json")
        )
    refuse_other_settings({"seed": 0}, arms, timings(1.0, 1.0, 1.0), Path("b.json"))


def test_what_cannot_be_compared_is_not_measured(
    command: Arbor, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("other.json").write_text(json.dumps(timings(1.0, 1.0, 1.0, seed=7)), encoding="utf-8")
    monkeypatch.setattr("arbor.cli.bench.measure", None)

    assert "[bench-differs]" in command("bench", "--compare", "other.json").err


def test_variants_of_a_policy_are_timed_with_it(command: Arbor) -> None:
    both = ("--policy", "arborkv", "--policy", "arborkv,scorer=recency, tail=16")
    fake_solver.SOLVERS.clear()

    ran = command("bench", *both, "--repeat", "3", "--budget", "full", "--json")

    names = [row["policy"] for row in ran.document["rows"]]
    assert names == ["arborkv", "arborkv,scorer=recency,tail=16"]
    policies = [solver.settings["policy"] for solver in fake_solver.SOLVERS]
    assert [type(policy.scorer).__name__ for policy in policies] == ["HeavyHitters", "Recency"]
    assert [policy.protect.tail for policy in policies] == [8, 16]


def test_a_gate_fails_with_seven_and_everything_is_written(command: Arbor) -> None:
    shape = ("bench", "--budget", "full", "--repeat", "3")
    assert command(*shape, "--output-json", "before.json").code == 0
    before = json.loads(Path("before.json").read_text("utf-8"))
    for row in before["rows"]:
        row["cpu_s"]["seconds"] = [1e-9] * 3
    Path("before.json").write_text(json.dumps(before), encoding="utf-8")

    ran = command(
        *(*shape, "--compare", "before.json", "--max-regress", "5%", "--output-json", "now.json")
    )

    assert ran.code == 7
    assert "[max-regress] reentry full: " in ran.err and "allowed 5 %" in ran.err
    assert "times" in ran.out and Path("now.json").is_file()
    assert command(*shape, "--compare", "before.json").code == 0, "without a gate it only reports"


ROWS = [
    (["--max-regress", "5%"], 2, "usage", "--compare before.json"),
    (["--compare", "b.json", "--max-regress", "5"], 2, "usage", "Write it as in 5%"),
    (["--compare", "nowhere.json"], 4, "bench-unreadable", "No such file"),
    (["--compare", "words.json"], 4, "bench-unreadable", "words.json is not JSON"),
    (["--compare", "list.json"], 4, "bench-unreadable", "not arbor.bench/1"),
    (["--compare", "other.json"], 2, "bench-differs", "other settings: "),
    (["--output-json", "no/where.json"], 2, "output-nowhere", "the folder no does not exist"),
    (["--repeat", "2"], 2, "usage", "a whole number >= 3"),
    (["--budget", "25"], 2, "budget-range", "Did you mean 0.25"),
    (["--policy", "lru,tail"], 2, "setting", "As in lru,tail=16"),
    (["--policy", "lru,tail=3,tail=4"], 2, "setting", "names a setting twice"),
    (["--policy", "lru,tial=3"], 2, "unknown-setting", "'tail'"),
    (["--budget", "full", "--budget", "1tok"], 6, "budget-infeasible", "28tok"),
    (["--policy", "lur"], 2, "unknown-policy", "'lru'"),
    (["4 5"], 4, "problem-invalid", "four are needed"),
]


@pytest.mark.parametrize(("arguments", "exit_code", "code", "words"), ROWS)
def test_an_error_says_what_would_work(
    command: Arbor, arguments: list[str], exit_code: int, code: str, words: str
) -> None:
    Path("words.json").write_text("slow", encoding="utf-8")
    Path("list.json").write_text("[]", encoding="utf-8")
    Path("other.json").write_text(json.dumps(timings(1.0, 1.0, 1.0, seed=7)), encoding="utf-8")

    ran = command("bench", *arguments)

    assert (ran.code, ran.out) == (exit_code, "")
    assert ran.err.startswith(f"arbor: error: [{code}] ") and "Traceback" not in ran.err
    assert words in ran.err


def test_a_percentage_is_a_fraction() -> None:
    assert [parse_percentage(text) for text in ("5%", "12.5%", None)] == [0.05, 0.125, None]
