"""``arbor compare``: its arms, its table against hand counts, its folder, resuming and its page."""

from __future__ import annotations

import csv
import json
import re
import signal
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from support import fake_solver
from support.run_cli import Arbor, await_line, spawn
from support.slow_cases import every

from arbor.cli.evaluation.arms import Arm, read_arms
from arbor.cli.evaluation.compare import compare as command_compare
from arbor.cli.record_options import SolverOptions
from arbor.errors import UsageError
from arbor.measure.evaluation.compare import ArmRuns, compare_arms
from arbor.measure.statistics import clopper_pearson
from arbor.support.file_lock import locked

RIGHT = "(10 - 4) * 5 - 6"  # what the fake solver answers


@pytest.fixture(autouse=True)
def no_solver_of_other_tests() -> None:
    """Searches are counted from here."""
    fake_solver.SOLVERS.clear()


def arms(*texts: str) -> list[Arm]:
    return read_arms(texts, click.Context(command_compare))


def problems(*wrong: str) -> str:
    """A file of four problems, which the fake solver answers wrongly if named."""
    names = ("one", "two", "three", "four")
    rows = ({"problem": n, "id": n, "answer": "2" if n in wrong else RIGHT} for n in names)
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return "p.jsonl"


def run(command: Arbor, *more: str, output: str = "out") -> Any:
    """A comparison of two arms on four problems in words."""
    given = ("compare", problems("two"), "--task", "reasoning", "--output", output, "--json")
    return command(*given, "--arm", "dpts", "--arm", "mcts", *more)


def searched() -> int:
    """Searches of all solvers."""
    return sum(len(solver.solved) for solver in fake_solver.SOLVERS)


# Arms


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (("",), "it names no controller"),
        (("=tot",), "it names no controller"),
        (("a=",), "it names no controller"),
        (("tot;beam",), "'beam' is not OPTION=VALUE"),
        (("tot;=4",), "'=4' is not OPTION=VALUE"),
        (("tot;policy=lru;policy=full",), "it has 'policy' twice"),
        (("tot;model=x",), "'model' is the same for all arms"),
        (("tot;budget=0.5",), "'budget' is the same for all arms"),
        (("tot", "tot"), "two arms are called 'tot'"),
        (("a=tot", "a=beam"), "--arm 'other=tot'"),
    ],
)
def test_an_invalid_arm(texts: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        arms(*texts)
    assert caught.value.code == "arm"


def test_what_an_arm_gives_wins_over_what_all_arms_have() -> None:
    shared = SolverOptions(given={"temperature": 0.9}, set=("width=2", "sampling.temperature=0.8"))

    own, plain, last = (
        arm.solver_options(shared).settings
        for arm in arms("a=tot,width=5;temperature=0.3", "tot", "c=tot,width=5;width=4")
    )

    assert [each.controller.width for each in (own, plain, last)] == [5, 2, 4]
    assert [each.sampling["temperature"] for each in (own, plain)] == [0.3, 0.8]


# The table


def row(right: bool, any_: bool | None = None, **costs: float) -> dict[str, Any]:
    own = {name: costs.pop(name) for name in ("cpu_s", "tokens_reused") if name in costs}
    return {"correct": right, "any_correct": any_, "metrics": costs, **own}


def runs(label: str, *seeds: Mapping[str, dict[str, Any]], tokens: int | None = 100) -> ArmRuns:
    names = tuple(f"arms/{label}/{seed}" for seed in range(len(seeds)))
    return ArmRuns(label, tokens, tuple(range(len(seeds))), names, seeds)


def outcomes(*right: bool) -> dict[str, dict[str, Any]]:
    return {str(place): row(each) for place, each in enumerate(right)}


def test_one_seed_has_exact_intervals_and_mcnemars_test() -> None:
    first = outcomes(True, True, False, False, False, False)
    second = outcomes(True, True, True, True, True, True)
    second["1"]["correct"] = False

    table = compare_arms([runs("a", first), runs("b", second)])

    assert table[0]["success"] == {
        "value": pytest.approx(2 / 6),
        "interval": list(clopper_pearson(2, 6)),
    }
    assert table[0]["difference"] is None
    pair = table[1]["difference"]
    assert (pair["with"], pair["n"]) == ("a", 6)
    assert pair["value"] == pytest.approx((4 - 1) / 6)
    assert pair["p"] == pytest.approx(2 * (1 + 5) / 2**5), "four against one"
    assert pair["interval"][0] < 3 / 6 < pair["interval"][1]


@pytest.mark.parametrize("right", [True, False])
def test_problems_that_all_end_alike_leave_doubt_with_any_number_of_seeds(right: bool) -> None:
    (row,) = compare_arms([runs("a", outcomes(right, right), outcomes(right, right))])

    assert row["success"]["interval"] == list(clopper_pearson(2 * right, 2))


# The command


def test_every_arm_solves_every_problem_in_a_folder_of_its_own(command: Arbor) -> None:
    ran = run(command, "--tokens", "100", "--tokens", "300", "--seeds", "2")

    assert ran.code == 0
    assert searched() == 2 * 2 * 2 * 4
    table = ran.document["table"]
    assert [(each["arm"], each["tokens"], each["seeds"]) for each in table] == [
        *(("dpts", 100, [0, 1]), ("mcts", 100, [0, 1])),
        *(("dpts", 300, [0, 1]), ("mcts", 300, [0, 1])),
    ]
    assert {each["success"]["value"] for each in table} == {0.75}
    for each in table:
        for seed, folder in zip(each["seeds"], each["folders"], strict=True):
            config = tomllib.loads(Path("out", folder, "run.toml").read_text("utf-8"))
            assert (config["max_tokens"], config["seed"]) == (each["tokens"], str(seed))
            assert config["controller"].lower().startswith(each["arm"])
    with Path("out/compare.csv").open(encoding="utf-8", newline="") as stream:
        written = list(csv.DictReader(stream))
    assert [(each["arm"], each["success"]) for each in written][:2] == [
        *(("dpts", "0.75"), ("mcts", "0.75"))
    ]
    assert json.loads(Path("out/compare.json").read_text("utf-8")) == ran.document


@pytest.mark.parametrize("number", every(2, [signal.SIGINT, signal.SIGKILL]), ids=["INT", "KILL"])
def test_a_comparison_that_is_ended_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [{"problem": each, "answer": RIGHT} for each in ("one", "two", "endless", "four")]
    Path("p.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines), "utf-8")
    arguments = ("compare", "p.jsonl", "--task", "reasoning", "--output", "out")
    arguments += ("--arm", "dpts", "--arm", "mcts")
    with spawn(*arguments) as process:
        await_line(process, b"running")
        process.send_signal(number)
        said, err = process.communicate(timeout=60)

    samples = Path("out/arms/dpts/unlimited-seed-0/samples.jsonl")
    before = samples.read_bytes()
    assert [json.loads(line)["problem"] for line in before.splitlines()] == ["one", "two"]
    assert not Path("out/arms/mcts").exists()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert err.count(b"to resume: arbor compare --config out/compare.toml --output out") == 1
        assert said.decode().splitlines()[1].split()[:2] == ["dpts", "2"]
    lines[2]["problem"] = "three"
    Path("p.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines), "utf-8")
    with spawn(*arguments, "--json") as process:
        said, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    assert [each["n"] for each in json.loads(said)["table"]] == [4, 4]
    assert samples.read_bytes().startswith(before), "nothing is solved twice"


def test_a_comparison_resumes_from_any_folder_and_counts_the_samples_asked_for(
    command: Arbor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path.cwd()
    text = "from arbor.controllers.chain import Chain\n\n\nclass Mine(Chain):\n    pass\n"
    Path("own").mkdir()
    Path("own/mine.py").write_text(text, encoding="utf-8")
    arms = ("--arm", "own/mine.py:Mine", "--arm", "other=own/mine.py:Mine;controller.samples=2")
    first = command(
        "compare", problems(), "--task", "reasoning", *arms, "--output", "out", "--json"
    )
    assert first.code == 0, first.err
    assert [each["arm"] for each in first.document["table"]] == ["mine.py:Mine", "other"]

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    out = str(here / "out")
    again = command(
        "compare", "--config", f"{out}/compare.toml", "--output", out, "--limit", "3", "--json"
    )

    assert again.code == 0, again.err
    assert [each["n"] for each in again.document["table"]] == [3, 3]
    assert "count too" not in again.err
    assert searched() == 8, "nothing is solved twice"


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (("--budget", "300tok", "--concurrency", "2"), "usage", "would share it"),
        (("--budget", "20tok"), "budget-infeasible", "the arm 'dpts' needs"),
        (("--tokens", "0"), "usage", "must be a whole number >= 1"),
        (("--arm", "beem"), "unknown-controller", "beam"),
    ],
)
def test_a_comparison_that_would_not_be_one(
    command: Arbor, more: Sequence[str], code: str, words: str
) -> None:
    ran = run(command, *more)

    assert ran.document["error"]["code"] == code
    assert words in ran.err
    assert not Path("out/compare.json").exists()


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (("--arm", "b=dpts", "--budget", "0.5"), "run-differs"),
        (("--arm", "b=dpts;temperature=0"), "run-differs"),  # of the last arm alone
        (("--arm", "b=dpts"), "run-busy"),
    ],
)
def test_a_refused_comparison_leaves_the_finished_one_as_it_is(
    command: Arbor, more: Sequence[str], code: str
) -> None:
    run(command, "--arm", "b=dpts")
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}

    with Path("out/arms/b/unlimited-seed-0/samples.jsonl").open("ab") as held:
        assert code != "run-busy" or locked(held)
        ran = run(command, *more)

    assert ran.document["error"]["code"] == code
    assert {p: p.read_bytes() for p in Path("out").rglob("*") if p.is_file()} == before


# The page


def test_the_page_has_a_row_for_each_problem_with_a_link_for_each_arm(command: Arbor) -> None:
    run(command, "--tokens", "100", "--tokens", "300")

    page = Path("out/index.html").read_text("utf-8")

    assert 'href="arms' in page and ".gz" not in page, "a trace is not a page"
    made = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert {"model", "seed", "arbor"} <= set(made)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC", made["last search"])
    assert "every setting of the first run" in page
    Path("out/index.html").unlink()
    assert command("view", "out", "--samples").code == 0
    page = Path("out/index.html").read_text("utf-8")
    listed = page[page.index('<table id="list">') :]
    assert re.findall(r'data-outcome="([^"]+)"', listed) == [
        *("all right", "none right", "all right", "all right")
    ]
    links = re.findall(r'href="(arms/[^"]+/traces/[^"]+)"', listed)
    assert len(links) == 4 * 2 and all("300-tokens" in each for each in links)
    assert all(Path("out", each).is_file() for each in links)
    for folder in re.findall(r'href="(arms/[^"]+/index.html)"', page):
        assert Path("out", folder).is_file()
    assert page.count("<figure") == 2
