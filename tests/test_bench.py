"""``arbor bench``: what it runs, what it says, and what it refuses to say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import fake_solver
from support.run_cli import Arbor, in_process

from arbor.cli.bench import Trial, of_machine
from arbor.run.settings import Settings


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
    ("then", "now", "key"),
    [
        (("threads=2",), ("threads=1",), "threads"),
        (("threads=2",), (), "threads"),
        ((), ("keep_kv=kept",), "keep_kv"),
        (("tp=2",), (), "tp"),
        (("threads=2", "keep_kv=kept"), ("threads=2", "keep_kv=kept"), None),
        ((), (), None),
    ],
)
def test_timings_of_another_setting_of_the_machine_are_not_compared(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    then: tuple[str, ...],
    now: tuple[str, ...],
    key: str | None,
) -> None:
    def measured(output: object, options: object, trial: Trial) -> dict[str, Any]:
        return timings(1.0, 1.0, 1.0, **trial.settings)

    def bench(settings: tuple[str, ...], *words: str) -> Any:
        more = [word for each in settings for word in ("--set", each)]
        return real("bench", "--budget", "full", "--policy", "lru", *more, *words, "--json")

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("arbor.cli.bench.measure", measured)
    real = in_process(capsys)
    assert bench(then, "--output-json", "then.json").code == 0

    compared = bench(now, "--compare", "then.json")

    if key is None:
        assert compared.code == 0 and "before" in compared.document["rows"][0]
    else:
        assert compared.document["error"]["code"] == "bench-differs"
        assert compared.document["error"]["data"]["keys"] == [key]


def test_threads_are_those_of_the_environment_where_none_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert of_machine(Settings()) == of_machine(Settings(threads=3)) == {"threads": "3"}
    assert of_machine(Settings(threads=2)) == {"threads": "2"}


WRONG: list[dict[str, Any]] = [
    {"settings": []},
    {"settings": None},
    {"rows": None},
    {"rows": []},
    {"rows": [7]},
    {"rows": [timings(1.0, 1.0, 1.0)["rows"][0] | {"policy": ["lru"]}]},
    {"rows": [{"budget": "full"}]},
    *(
        {"rows": [timings(1.0, 1.0, 1.0)["rows"][0] | {clock: value}]}
        for clock in ("cpu_s", "wall_s")
        for value in (
            *(None, 3, {}, {"seconds": None}),
            *({"seconds": each} for each in ([1.0, 1.0], [0.0, 0.0, 0.0], [None, 1.0, 1.0])),
            *({"seconds": [1.0, 1.0, each]} for each in (-1.0, float("nan"), 10**400, True, "1")),
        )
    ),
]


@pytest.mark.parametrize("change", WRONG)
def test_what_holds_no_timings_is_refused_before_anything_is_measured(
    command: Arbor, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    Path("odd.json").write_text(json.dumps(timings(1.0, 1.0, 1.0) | change), encoding="utf-8")
    monkeypatch.setattr("arbor.cli.bench.measure", None)

    ran = command("bench", "--compare", "odd.json", "--json")

    assert (ran.code, ran.document["error"]["code"]) == (4, "bench-unreadable")


def test_what_cannot_be_compared_is_not_measured(
    command: Arbor, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("other.json").write_text(json.dumps(timings(1.0, 1.0, 1.0, seed=7)), encoding="utf-8")
    monkeypatch.setattr("arbor.cli.bench.measure", None)

    assert "[bench-differs]" in command("bench", "--compare", "other.json").err
