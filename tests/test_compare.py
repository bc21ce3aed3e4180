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
from support.run_cli import Arbor, await_line, in_process, spawn

from arbor import Solver
from arbor.cli.evaluation.arms import Arm, read_arms
from arbor.cli.evaluation.compare import compare as command_compare
from arbor.errors import UsageError
from arbor.events import Boundary, Event, Opened
from arbor.measure.evaluation.compare import ArmRuns, compare_arms, csv_rows
from arbor.measure.evaluation.compare_page import compare_page
from arbor.measure.evaluation.plot import MOST_BINS, binned, plot
from arbor.measure.evaluation.reused_tokens import ReusedTokens
from arbor.measure.statistics import bootstrap, clopper_pearson

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


def test_an_arm_is_a_controller_with_its_settings_and_options() -> None:
    plain, settings, labelled = arms(
        "dpts", "mcts,simulations=9", "greedy=chain,samples=1; temperature=0 ;verifier.words=true"
    )

    assert (plain.label, plain.controller, plain.options) == ("dpts", "dpts", {})
    assert (settings.label, settings.controller) == ("mcts,simulations=9",) * 2
    assert (labelled.label, labelled.controller) == ("greedy", "chain,samples=1")
    assert labelled.options == {"temperature": 0.0}
    assert labelled.settings == ("verifier.words=true",)


def test_options_of_an_arm_are_read_as_on_the_command_line() -> None:
    (arm,) = arms("a=tot;--max-depth=2;first=verified;confidence=0.5;policy=lru,tail=3")

    assert arm.options == {
        "max_depth": 2,
        "first": "verified",
        "confidence": 0.5,
        "policy": "lru,tail=3",
    }


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


def test_an_arms_value_is_checked_as_its_option(command: Arbor) -> None:
    ran = run(command, "--arm", "tot;temperature=-1")

    assert (ran.code, ran.document["error"]["code"]) == (2, "limit")
    assert (
        "temperature is -1.0. It is a number of at least 0." in ran.err and not Path("out").exists()
    )


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


def test_several_seeds_are_averaged_by_problem() -> None:
    a = runs("a", outcomes(True, True, False), outcomes(True, False, False))
    b = runs("b", outcomes(True, True, True), outcomes(True, True, False))

    table = compare_arms([a, b])

    assert table[0]["success"]["value"] == pytest.approx(0.5)
    assert table[0]["success"]["interval"] == list(bootstrap([1.0, 0.5, 0.0]))
    assert table[1]["difference"]["value"] == pytest.approx((0 + 0.5 + 0.5) / 3)
    assert table[1]["difference"]["interval"] == list(bootstrap([0.0, 0.5, 0.5]))
    assert table[1]["difference"]["p"] is None, "the problems' seeds are not pairs"


def test_costs_are_means_of_a_search_and_peaks_have_a_largest() -> None:
    one = {
        "x": row(True, tokens_generated=100, peak_tokens=50, cpu_s=1.0, tokens_reused=7),
        "y": row(False, True, tokens_generated=300, peak_tokens=90, cpu_s=2.0, tokens_reused=9),
    }
    two = {"x": row(False, tokens_generated=200, peak_tokens=10), "y": row(False, False)}

    (found,) = compare_arms([runs("a", one, two)])

    assert found["tokens_generated"] == pytest.approx((100 + 300 + 200) / 4)
    assert (found["cpu_s"], found["tokens_reused"]) == (pytest.approx(0.75), pytest.approx(4))
    assert found["largest_peak_tokens"] == 90
    assert found["any_correct"]["value"] == pytest.approx(0.5)


def test_samples_that_a_run_lacks_are_left_out() -> None:
    whole, part = outcomes(True, True, False), outcomes(True)

    table = compare_arms([runs("a", whole), runs("b", whole, part), runs("c", {})])

    assert [each["n"] for each in table] == [3, 1, 0]
    assert table[1]["difference"]["n"] == 1
    assert table[2]["difference"] is None and table[2]["success"]["interval"] == [0.0, 1.0]


def test_the_baseline_is_the_first_arm_at_the_same_tokens() -> None:
    low, high = outcomes(False, False), outcomes(True, True)

    table = compare_arms(
        [
            runs("a", low),
            runs("b", high),
            runs("a", high, tokens=400),
            runs("b", high, tokens=400),
        ]
    )

    assert [each["difference"] and each["difference"]["value"] for each in table] == [
        *(None, 1.0, None, 0.0)
    ]


def test_the_share_that_ended_at_the_limit_of_tokens() -> None:
    rows = {"x": row(True) | {"limit": "max_tokens"}, "y": row(True) | {"limit": "first"}}

    assert compare_arms([runs("a", rows)])[0]["reached_tokens"] == 0.5


def test_a_csv_row_has_a_value_for_every_column() -> None:
    table = compare_arms([runs("a", outcomes(True)), runs("b", outcomes(False))])

    names, first, second = csv_rows(table)

    assert len(names) == len(first) == len(second) == len(set(names))
    assert dict(zip(names, first, strict=True))["difference"] == ""
    assert dict(zip(names, second, strict=True))["difference"] == -1.0


def test_reused_tokens_are_those_above_each_block() -> None:
    reused = ReusedTokens()
    events: list[Event] = []
    with Solver(controller="tot", verifier="exact", listeners=[reused, events.append]) as solver:
        solver.solve("4 5 6 10")
        tree = solver.engine.tree

    assert reused.total == sum(node.start for node in tree.nodes[1:]) > 0
    assert sum(isinstance(event, Opened) for event in events) == len(tree.nodes)
    assert any(isinstance(event, Boundary) for event in events)


# The command


def test_every_arm_solves_every_problem_in_a_folder_of_its_own(command: Arbor) -> None:
    ran = run(command, "--tokens", "100", "--tokens", "300", "--seeds", "2", "--csv", "t.csv")

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
    with Path("t.csv").open(encoding="utf-8", newline="") as stream:
        written = list(csv.DictReader(stream))
    assert [(each["arm"], each["success"]) for each in written][:2] == [
        *(("dpts", "0.75"), ("mcts", "0.75"))
    ]
    assert Path("out/compare.csv").read_bytes() == Path("t.csv").read_bytes()
    assert json.loads(Path("out/compare.json").read_text("utf-8")) == ran.document


def test_without_json_the_table_is_lines(command: Arbor) -> None:
    given = ("compare", problems("two"), "--task", "reasoning", "--output", "out")

    ran = command(*given, "--arm", "a=dpts", "--arm", "tot")

    head, first, second, *_ = ran.out.splitlines()
    assert head.split()[:3] == ["arm", "tokens", "n"]
    assert first.split()[:2] == ["a", "4"] and "75.0 (19.4 to 99.4)" in first
    assert second.endswith("+0.0, 4 problems decide nothing")
    assert ran.out.splitlines()[-1] == "folder out"


def test_the_same_command_again_solves_nothing(command: Arbor) -> None:
    first = run(command, "--tokens", "100")
    before = searched()

    again = run(command, "--tokens", "100")

    assert searched() == before == 8
    assert again.document == first.document


def test_a_further_arm_and_a_larger_limit_go_on(command: Arbor) -> None:
    run(command, "--limit", "2")
    assert searched() == 2 * 2

    ran = run(command, "--limit", "4", "--arm", "tot")

    assert searched() == 2 * 4 + 4
    assert [each["n"] for each in ran.document["table"]] == [4, 4, 4]


def test_a_smaller_limit_compares_those_only(command: Arbor) -> None:
    run(command)

    ran = run(command, "--limit", "1")

    assert [each["n"] for each in ran.document["table"]] == [1, 1]


def test_the_settings_of_a_comparison_repeat_it(command: Arbor) -> None:
    more = ("--tokens", "100", "--seeds", "2", "--temperature", "0.5", "--set", "first=answer")
    first = run(command, *more, "--set", "sampling.top_k=4")
    before = searched()

    again = command("compare", "--config", "out/compare.toml", "--output", "out", "--json")

    assert (again.code, searched()) == (0, before)
    assert again.document["table"] == first.document["table"]


def test_an_error_keeps_what_is_finished_and_names_the_way_on(command: Arbor) -> None:
    Path("bad.jsonl").write_text(
        '{"problem": "one", "answer": "1"}\n{"problem": "unsolvable", "answer": "2"}\n'
    )
    given = ("--task", "reasoning", "--output", "out", "--arm", "tot", "--arm", "beam")

    ran = command("compare", "bad.jsonl", *given)

    assert ran.code == 4
    assert "to resume: arbor compare --config out/compare.toml --output out" in ran.err
    assert json.loads(Path("out/compare.json").read_text("utf-8"))["table"] == []

    ran = command("compare", "bad.jsonl", *given, "--on-error", "continue", "--json", "--fresh")
    assert [each["errors"] for each in ran.document["table"]] == [1, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["INT", "KILL"])
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


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (("--budget", "300tok", "--concurrency", "2"), "usage", "would share it"),
        (("--budget", "20tok"), "budget-infeasible", "the arm 'dpts' needs"),
        (("--csv", "nowhere/t.csv"), "output-nowhere", "--csv"),
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


def test_one_arm_is_no_comparison(command: Arbor) -> None:
    ran = command("compare", problems(), "--task", "reasoning", "--arm", "tot")

    assert ran.code == 2 and "a comparison needs 2 arms, not 1" in ran.err


def test_a_ratio_is_of_each_searchs_own_full_retention(command: Arbor) -> None:
    ran = run(command, "--budget", "0.5", "--tokens", "200", "--tokens", "400")

    assert ran.document["budgets"] == [[200, "0.5"], [400, "0.5"]]


def test_another_folder_is_left_alone(command: Arbor) -> None:
    Path("out").mkdir()
    Path("out/thesis.tex").write_text("years of work", encoding="utf-8")

    ran = run(command)

    assert (ran.code, ran.document["error"]["code"]) == (2, "run-foreign")
    assert {path.name for path in Path("out").iterdir()} == {"thesis.tex"}


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


def test_pages_of_the_searches_are_linked_once_they_are_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    real = in_process(capsys)
    given = ("--arm", "chain", "--arm", "greedy=chain;temperature=0", "--output", "out")
    ran = real("compare", "game24", "--limit", "1", *given, "--tokens", "60", "--json")
    assert ran.code == 0, ran.err
    greedy = ran.document["table"][1]
    assert greedy["n"] == 1 and greedy["tokens_generated"] > 0 < greedy["tokens_reused"]

    assert real("view", "out", "--samples").code == 0

    page = Path("out/index.html").read_text("utf-8")
    links = re.findall(r'href="(arms/[^"]+/traces/[^"]+)"', page)
    assert "<dt>search</dt><dd>chain" in page and "<dt>task</dt><dd>game24</dd>" in page
    assert "<small>sampling temperature=0.0" in page, "what only an arm has"
    assert len(links) == 2
    assert all(each.endswith(".html") and Path("out", each).is_file() for each in links)


def test_the_page_shows_names_as_text_and_asks_nobody(tmp_path: Path) -> None:
    hostile = '<img src=x onerror="alert(1)">'
    rows = {hostile: row(True) | {"id": hostile, "problem": hostile, "trace": "traces/x.gz"}}
    arm = runs(hostile, rows)
    found = {"dataset": hostile, "samples": 1, "budgets": [[100, "full"]]}

    page = compare_page(found | {"table": compare_arms([arm])}, [arm], tmp_path)

    assert "<img" not in page and page.count("<script") == 1
    assert not re.search(r"https?://|//[a-z]", page)


# Plots


def test_groups_of_a_plot_have_equal_sizes_and_exact_intervals() -> None:
    rows = [{"correct": place >= 50} for place in range(100)]

    series = binned("x", rows, [float(place) for place in range(100)])

    assert len(series.points) == MOST_BINS
    assert series.points[0].share == 0 and series.points[-1].share == 1
    first = series.points[0]
    assert (first.low, first.high) == clopper_pearson(0, 12)
    assert first.x == pytest.approx(sum(range(12)) / 12)


def test_few_samples_are_one_group() -> None:
    (point,) = binned("x", [{"correct": True}, {"correct": False}], [5.0, 7.0]).points

    assert (point.x, point.share) == (6.0, 0.5)


@pytest.mark.parametrize("most", [0.0, 1.0, 7.0, 99.0, 100.0, 640.0, 12345.0])
def test_an_axis_holds_every_point(most: float) -> None:
    drawn = plot("t", "tokens", [binned("x", [{"correct": True}], [most])])

    places = [float(each) for each in re.findall(r'cx="([0-9.]+)"', drawn)]
    assert places and all(44 <= place <= 506 for place in places[:1])
    numbers = re.findall(r'class="middle" x="([0-9.]+)"', drawn)
    assert 3 <= len(numbers) <= 9 or most == 0.0
