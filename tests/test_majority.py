"""scripts/bench_majority.py: chains of another engine, grouped and graded as arbor's own are."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.gguf_files import llama, write_gguf

from arbor import Solver
from arbor.run.request import Request
from arbor.run.run import Run

pytest.importorskip("gguf", reason="the extra `gguf` is not installed")

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
EOS = 2
KEYS = ("18", "7")
# what each chain says; the last one is cut off, so that its number is no answer
CHAINS = ("#### 5", "so the answer is 18.", "#### 18.00", "then there are 5")
# answers each line with as many of these chains as it asks for, and keeps the line
STANDIN = """
import json, sys
chains, log = json.load(open(CHAINS)), open(LOG, "a")
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    log.write(line)
    log.flush()
    texts = chains[: asked["samples"]]
    print(json.dumps({"texts": texts, "cpu_seconds": 2.5, "wall_seconds": 1.5, "cells_peak": 40}),
          flush=True)
"""


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    import bench_majority

    yield bench_majority
    sys.path.remove(str(SCRIPTS))


@pytest.fixture
def solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Solver:
    """Of a small GGUF file, whose tokenizer knows every byte."""
    monkeypatch.setenv("ARBOR_CACHE", str(tmp_path / "cache"))
    write_gguf(llama(), tmp_path / "tiny.gguf")
    return Solver(tmp_path / "tiny.gguf", task="gsm8k", controller="chain")


@pytest.fixture
def majority(
    script: ModuleType, solver: Solver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[dict[str, str]]]:
    """Runs the script with a stand-in of llama.cpp; its rows."""
    chains = [solver.tokenizer.encode(text, add_special_tokens=False) for text in CHAINS]
    ended = [[*chain, EOS] for chain in chains[:-1]]
    (tmp_path / "chains.json").write_text(json.dumps([*ended, chains[-1]]), "utf-8")
    named = STANDIN.replace("CHAINS", repr(str(tmp_path / "chains.json")))
    (tmp_path / "peer.py").write_text(named.replace("LOG", repr(str(tmp_path / "log"))), "utf-8")
    python = tmp_path / "llama.cpp" / "bin" / "python"
    python.parent.mkdir(parents=True)
    words = [sys.executable, str(tmp_path / "peer.py")]
    python.write_text(f"#!/bin/sh\nexec {shlex.join(words)}\n", "utf-8")
    python.chmod(0o755)
    rows = [{"question": f"How many are {key}?", "answer": f"#### {key}"} for key in KEYS]
    data = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "problems.jsonl").write_text(data, "utf-8")

    def run(*options: str) -> list[dict[str, str]]:
        fixed = ["--model", tmp_path / "tiny.gguf", "--dataset", tmp_path / "problems.jsonl"]
        fixed += ["--folder", tmp_path, "--csv", tmp_path / "rows.csv"]
        monkeypatch.setattr(sys, "argv", ["bench_majority.py", *map(str, fixed), *options])
        script.main()
        with (tmp_path / "rows.csv").open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    return run


def asked(folder: Path) -> list[dict[str, Any]]:
    """What the stand-in was asked, without what warms it up."""
    lines = (folder / "log").read_text("utf-8").splitlines()
    return [each for each in map(json.loads, lines) if each["stop"]]


def test_chains_are_grouped_and_graded_as_those_of_a_search(
    majority: Callable[..., list[dict[str, str]]], solver: Solver, tmp_path: Path
) -> None:
    rows = majority("--n", "2", "--samples", "1", "2", "3", "4")

    found = [
        [row[name] for name in ("problem", "samples", "right", "votes", "cut")] for row in rows
    ]
    assert found == [
        ["1", "1", "0", "1", "0"],
        ["1", "2", "0", "1", "0"],  # of equal votes the first
        ["1", "3", "1", "2", "0"],  # 18 and 18.00 are one answer
        ["1", "4", "1", "2", "1"],  # a guess of a chain that was cut has no vote
        *(["2", str(k), "0", str(1 + (k > 2)), str(int(k > 3))] for k in (1, 2, 3, 4)),
    ]
    assert (rows[0]["cpu_s"], rows[0]["wall_s"], rows[0]["peak_kv_tokens"]) == ("2.5", "1.5", "40")
    assert int(rows[0]["generated"]) == len(CHAINS[0]) + 1
    first, second = asked(tmp_path)[:2]
    assert first["prompt"] == Run(solver.setup, "How many are 18?", Request()).prompt
    assert (first["temperature"], second["temperature"]) == (0.0, 0.7)
    assert first["stop"] == [EOS] and first["max_tokens"] == solver.boundary.longest_path


def test_the_same_command_goes_on_and_processes_share_the_problems(
    majority: Callable[..., list[dict[str, str]]], tmp_path: Path
) -> None:
    majority("--from", "2", "--n", "1", "--samples", "2")
    rows = majority("--n", "2", "--samples", "1", "2")
    again = majority("--n", "2", "--samples", "1", "2")

    assert [(row["problem"], row["samples"]) for row in rows] == [
        *(("2", "2"), ("1", "1"), ("1", "2"), ("2", "1"))
    ]
    assert again == rows and len(asked(tmp_path)) == len(rows)
