"""scripts/accuracy_cost.py: arms of arbor and of llama.cpp on the same problems; and its figure."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.run_cli import in_process

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture(scope="module")
def scripts() -> Iterator[Path]:
    sys.path.insert(0, str(SCRIPTS))
    yield SCRIPTS
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def accuracy_cost(scripts: Path) -> ModuleType:
    import accuracy_cost

    return accuracy_cost


def peer_table(path: Path, samples: list[str]) -> Path:
    """A table of `bench_majority.py`: every second problem is right."""
    names = ("model", "dataset", "sample", "samples", "right")
    costs = ("cpu_s", "wall_s", "generated", "peak_kv_tokens")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*names, *costs))
        for place, sample in enumerate(samples):
            writer.writerow(("m", "d", sample, 8, place % 2, 10 * place, 5, 100, 50 + place))
    return path


def test_only_problems_of_every_arm_count(
    accuracy_cost: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    ran = in_process(capsys)(
        *("compare", "chains", "--limit", "3", "--trace", "off", "--output", str(folder)),
        *("--arm", "greedy=chain;temperature=0", "--arm", "beam=beam,beam_size=1,width=1"),
        *("--set", "max_depth=2", "--budget", "0.5"),
    )
    assert ran.code == 0, ran.err
    found = json.loads((folder / "compare.json").read_text("utf-8"))
    ids = found["sample_ids"]
    table = peer_table(tmp_path / "peer.csv", [*ids[:2], "another"])

    ours = accuracy_cost.arm_rows(accuracy_cost.of_arbor([folder]))
    both = accuracy_cost.arm_rows(
        [*accuracy_cost.of_peers([table]), *accuracy_cost.of_arbor([folder])]
    )

    for row, whole in zip(ours, found["table"], strict=True):
        assert row["by"] == "arbor" and row["n"] == 3 and row["budget"] == "0.5"
        assert row["solved_percent"] == round(100 * whole["success"]["value"], 1)
        assert row["cpu_s"] == round(whole["cpu_s"], 2)
        assert row["peak_kv_tokens"] == round(whole["peak_tokens"])
    assert [(row["arm"], row["chains"]) for row in both] == [
        *(("majority-8", 8), ("greedy", 1), ("beam", ""))
    ]
    assert {row["n"] for row in both} == {2}
    assert both[0]["solved_percent"] == 50 and both[0]["cpu_s"] == 5
    with pytest.raises(SystemExit, match="no problem was solved by every arm"):
        other = peer_table(tmp_path / "other.csv", ["another"])
        accuracy_cost.arm_rows(
            [*accuracy_cost.of_peers([other]), *accuracy_cost.of_arbor([folder])]
        )
    with pytest.raises(SystemExit, match="there twice"):
        accuracy_cost.arm_rows(accuracy_cost.of_peers([table, table]))


def test_the_figure_has_a_point_for_each_arm(
    scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import report

    names = ("task", "arm", "n", "generated", "peak_kv_tokens", "note")
    shares = ("success_percent", "success_low_percent", "success_high_percent")
    rows = [
        ("t", "best-of-n,samples=8;aggregate=majority", 100, 2500, 2400, "", 70, 60, 80),
        ("t", "best-of-n,samples=2;aggregate=majority", 100, 600, 700, "", 60, 50, 70),
        ("t", "chain;temperature=0", 100, 310, 400, "", 55, 45, 65),
        ("t", "chain;temperature=0", 100, 300, 400, "", 56, 45, 65),  # measured again
        ("t", "chain;temperature=0", 400, 1, 1, "", 1, 1, 1),
        ("t", "rebase,width=4", 100, 1200, 900, "", 61, 51, 70),
        ("t", "mcts", 100, 1, 1, "outdated: why", 1, 1, 1),
        ("another", "rebase,width=4", 100, 1, 1, "", 1, 1, 1),
    ]
    with (tmp_path / "controllers.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([(*names, *shares), *rows])
    costs = [
        ("machine", "by", "arm", "budget", "cpu_s", "peak_kv_tokens"),
        (report.TIMED_ON, "arbor", "greedy", "full", 99, 440),
        (report.TIMED_ON, "arbor", "greedy", "full", 30, 440),
        (report.TIMED_ON, "arbor", "majority-8", "full", 120, 2200),
        (report.TIMED_ON, "arbor", "majority-8", "0.25", 320, 550),
        (report.TIMED_ON, "arbor", "rebase", "full", 110, 900),
        (report.TIMED_ON, "llama.cpp", "greedy", "full", 32, 440),
        ("another", "llama.cpp", "greedy", "full", 1, 440),
    ]
    with (tmp_path / "accuracy_cost.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(costs)
    monkeypatch.setattr(report, "DATA", tmp_path)

    tokens, kv, seconds = report.accuracy_against_cost("t").axes

    def points(panel: report.Axes) -> list[list[list[float]]]:
        bars, _ = panel.get_legend_handles_labels()
        return [[[float(x), float(y)] for x, y in bar.lines[0].get_xydata()] for bar in bars]

    assert points(tokens) == [[[300, 56], [600, 60], [2500, 70]], [[1200, 61]]]
    assert points(kv) == [[[400, 56], [700, 60], [2400, 70]], [[900, 61]], [[600, 70]]]
    assert points(seconds) == [[[30, 56], [120, 70]], [[110, 61]], [[320, 70]], [[32, 56]]]
    assert [text.get_text() for text in kv.texts] == ["1", "2", "8", "rebase"]
