"""Every script's smallest run succeeds and writes a readable report.

The figures are not checked; mypy checks the calls of every script.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import warm_process

from arbor.tasks.base import BlockLimits
from controllers.chain import Chain
from controllers.tot import ToT

SCRIPTS = Path(__file__).parents[1] / "scripts"
# used by other scripts
HELPERS = {
    "experiment_table",
    "gpu_pieces",
    "model_and_problems",
    "mutate_server",
    "random_llama",
    "rounds",
    "similar_pairs",
    "wipe_out",
    "without",
}

# script -> arguments of its small runs; FOLDER is an empty folder
QUICK: dict[str, tuple[str, ...]] = {
    "bench_start": ("--n 1 --commands version --csv FOLDER/out.csv",),
    "bench_policy": ("--sizes 200 --rounds 3 --json FOLDER/out.json",),
    "describe_sapling": ("--check",),
    "evidence": (
        "--model builtin:sapling --dataset game24 --n 2 --experiments 1 2 10 --dry-run",
        "--model builtin:sapling --dataset game24 --n 2 --arms trees/*/lru/0.5 --dry-run",
    ),
    "docs": ("--check",),
    "fetch_models": ("--list",),
    "gpu_bundle": ("--dry-run --out FOLDER/bundle --json FOLDER/out.json",),
    "report": ("--check --tables",),
}
SLOW: dict[str, tuple[str, ...]] = {
    "mutate": ("--folder arbor/memory --n 3 --list",),
    "bench_ranks": ("--model builtin:sapling --rows 1 --tokens 4 --rounds 1 --csv FOLDER/out.csv",),
    "kill_ranks": ("--rounds 1 --csv FOLDER/out.csv",),
    "check_ranks": (
        "--model builtin:sapling --device cpu --dtypes float32 --tokens 6 --load-s 300 "
        "--part-s 300 --limit-s 900 --csv FOLDER/out.csv",
    ),
    "bench_int8": (
        "answers --of weights --n 2 --csv FOLDER/out.csv",
        "decode --of kv --size 5m --shapes F1 --rounds 1 --csv FOLDER/other.csv",
    ),
    "eval_tiers": (
        "splits --n 1 --parts 1 0.25 --csv FOLDER/out.csv",
        "destroyed --n 1 --rules size --csv FOLDER/other.csv",
    ),
    "eval_packed": ("game24 --n 1 --bits 4 --csv FOLDER/out.csv",),
    "bench_exit": ("--size 5m --prompt 16 --leaves 2 --rounds 3 --json FOLDER/out.json",),
    "soak_server": ("--minutes 0.05 --clients 3 --shares plain=2 leave=1 --csv FOLDER/out.csv",),
    "bench_server": ("--clients 1 2 --requests 2 --tokens 4 --rounds 1 --csv FOLDER/out.csv",),
    "bench_sharing": (
        "--prefixes 8 40 --branches 2 --rounds 1 --csv FOLDER/out.csv",
        "--model builtin:sapling --task chains --prefixes 8 40 --branches 2 --rounds 1",
    ),
    "bench_budget": ("--n 1 --searches tot-dfs --budgets 0.5 --host --csv FOLDER/out.csv",),
    "bench_ratio": ("--n 1 --searches chain --together 2 --host --csv FOLDER/out.csv",),
    "ratio_bound": ("--search chain --together 2 --csv FOLDER/out.csv",),
    "bench_compressed": (
        "--size 5m --prompt 128 --part 0.5 --rounds 1 --tokens 4 --policies streaming h2o/32 snapkv/heads/32",
    ),
    "bench_concurrency": (
        "--problems 2 --rounds 1 --at-a-time 1 2 --only searches --csv FOLDER/out.csv",
        "--problems 2 --rounds 1 --at-a-time 1 2 --only lossy --csv FOLDER/out.csv",
    ),
    "bench_decode": ("--size 5m --shapes F8 --rounds 1 --deepcopy --torch --json FOLDER/out.json",),
    "bench_dpts": (
        "--n 1 --verifiers exact --width 3 --visited 3 --json FOLDER/out.json",
        "--n 1 --verifiers self --task chains --width 2 --visited 2 --json FOLDER/out.json",
    ),
    "bench_peers": ("--peers generate --size 5m --shapes F8 --rounds 1 --csv FOLDER/out.csv",),
    "bench_majority": (),  # tests/test_majority.py runs it
    "accuracy_cost": (),  # its own test runs it
    "bench_engine": (
        "--rounds 1 --json FOLDER/out.json",
        "--only search --rounds 1 --json FOLDER/out.json",
    ),
    "bench_reward": ("--rounds 1 --depths 2 --problems 1 --csv FOLDER/out.csv",),
    "evidence": (
        "--model builtin:sapling --dataset chains --n 1 --experiments 3 5 6 10 --max-depth 4 "
        "--tokens 64 --threads 1 --yes "
        "--out FOLDER/run",
    ),
    "eval_attention": ("--n 1 --tasks chains --thresholds 0.001 --csv FOLDER/out.csv",),
    "eval_prompts": (),
    "eval_policies": (
        "lossy --task chains --steps 2 2 --n 1 --budgets 0.9 --policies h2o --json FOLDER/out.json",
        "same --n 1 --searches beam --budgets 0.5 --json FOLDER/out.json",
        "lossless --n 1 --searches beam --budgets 0.5 --json FOLDER/out.json",
        "largest --n 1 --json FOLDER/out.json",
        "share --n 1 --blocks 174 --policies reentry --json FOLDER/out.json",
    ),
    "eval_sapling": ("--n 2 --tree 1 --words 1 --steps 2 --json FOLDER/out.json",),
    "eval_rksc": (
        "gates --n 8 --calibration 8 --csv FOLDER/gates.csv",
        "layers --n 8 --calibration 8",
        "share --n 2",
        "pipeline --size 5m --prefix 40 --rounds 2",
        "searches --n 1 --rounds 1 --searches beam",
    ),
    "eval_judges": (
        "--n 2 --samples 2 --temperature 1 --chains FOLDER/chains.jsonl --csv FOLDER/out.csv",
    ),
    "eval_search": ("--n 1 --json FOLDER/out.json",),
    "gpu_check": ("--device cpu --out FOLDER/rows.jsonl",),
    "picture": ("--check",),
    "train_on_trees": (
        "--work FOLDER/work --controller chain,samples=2 --puzzles 1 --tokens 100 --measure 1",
    ),
    "train_sapling": (
        "--minutes 0.02 --work FOLDER/work --out FOLDER/model --set hidden_size=64",
        "--steps 2 --level 1 --rows 1 1 --work FOLDER/work --set hidden_size=64",
    ),
}

# Their own processes import them as the main module.
WITH_PROCESSES = ("train_sapling",)


def runs(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(name, arguments) for name, several in table.items() for arguments in several]


def check(name: str, arguments: str, folder: Path) -> None:
    given = shlex.split(arguments.replace("FOLDER", str(folder)))
    script = str(SCRIPTS / f"{name}.py")
    if name in WITH_PROCESSES:
        done = subprocess.run(
            [sys.executable, script, *given],
            cwd=folder,
            timeout=600,
            capture_output=True,
            text=True,
        )
    else:
        done = warm_process.run(script, *given, cwd=folder, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    if "out.json" in arguments:
        assert json.loads((folder / "out.json").read_text())
    if "rows.jsonl" in arguments:
        assert [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_no_script_is_left_out() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {*QUICK, *SLOW, *HELPERS}


@pytest.mark.parametrize(("name", "arguments"), runs(QUICK))
def test_a_script_runs(name: str, arguments: str, tmp_path: Path) -> None:
    check(name, arguments, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), runs(SLOW))
def test_a_long_script_runs(name: str, arguments: str, tmp_path: Path) -> None:
    check(name, arguments, tmp_path)


def test_an_estimate_counts_no_more_tokens_than_a_path_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    most_tokens = importlib.import_module("evidence_stages.costs").most_tokens
    limits = BlockLimits((), max_tokens=192, max_depth=64, path_tokens=1024)
    chain: Any = SimpleNamespace(boundary=limits, controller=Chain())
    assert most_tokens(chain) == 1024
    chain.boundary = replace(limits, path_tokens=None)
    assert most_tokens(chain) == 64 * 192
    tree: Any = SimpleNamespace(boundary=limits, controller=ToT(strategy="dfs"))
    assert most_tokens(tree) == tree.controller.max_blocks(64) * 192


def test_every_script_that_searches_takes_a_model_and_a_data_set() -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in SCRIPTS.glob("*.py")}
    searching = {name for name, text in texts.items() if re.search(r'\bSolver\(|"serve"', text)}
    of_problems = {name for name in searching if "add_model_and_problems" in texts[name]}

    own = {
        "bench_ranks",
        "bench_start",
        "check_ranks",
        "evidence",
        "eval_prompts",
    }  # or none that could be others
    assert searching <= of_problems | own, "add the options of model_and_problems.py"
