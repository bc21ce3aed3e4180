"""Every script's smallest run succeeds and writes a readable report.

The figures are not checked; mypy checks the calls of every script.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import chromium, warm_process
from support.reward_models import byte_tokenizer, save

from arbor.kernels.native import FILE

SCRIPTS = Path(__file__).parents[1] / "scripts"
# used by other scripts
HELPERS = {
    "experiment_table",
    "model_and_problems",
    "mutate_server",
    "random_llama",
    "wipe_out",
    "without",
}

# script -> arguments of its small runs; FOLDER is an empty folder, CHECKOUT this one, LIBRARY its
# native kernels
QUICK: dict[str, tuple[str, ...]] = {
    "bench_start": ("--n 1 --commands version --json FOLDER/out.json",),
    "bench_heads": (
        "--tokens 400 --layers 2 --heads 2 --blocks 1 4 --rounds 2 --move --json FOLDER/out.json",
    ),
    "bench_policy": ("--sizes 200 --rounds 3 --json FOLDER/out.json",),
    "describe_sapling": ("--check",),
    "evidence": ("--model builtin:sapling --dataset game24 --n 2 --dry-run",),
    "docs": ("--check",),
    "fetch_models": ("--list",),
    "mutate": ("--folder arbor/memory --n 3 --list",),
    "gpu_bundle": ("--dry-run --out FOLDER/bundle --json FOLDER/out.json",),
    "report": ("--check --tables",),
}
SLOW: dict[str, tuple[str, ...]] = {
    "bench_attention": ("--leaves 8 --rounds 1 --steps 1 --json FOLDER/out.json",),
    "bench_linear": ("--rows 3 --sizes 64x48 --rounds 2 --csv FOLDER/out.csv",),
    "bench_beams": ("--size 5m --beams 4 --prompt 20 --tokens 4 --rounds 1 --csv FOLDER/out.csv",),
    "bench_int8_weights": ("answers --n 2 --csv FOLDER/out.csv",),
    "bench_kv_int8": ("answers --n 2 --csv FOLDER/out.csv",),
    "bench_store": ("--n 1 --searches beam --csv FOLDER/out.csv",),
    "eval_tiers": (
        "splits --n 1 --parts 1 0.25 --csv FOLDER/out.csv",
        "destroyed --n 1 --rules size --csv FOLDER/other.csv",
    ),
    "eval_packed": ("game24 --n 1 --bits 4 --csv FOLDER/out.csv",),
    "bench_fetch": ("--models sapling --rounds 1 --csv FOLDER/out.csv",),
    "bench_native": (
        "search --n 1 --rounds 1 --controllers tot --csv FOLDER/out.csv",
        "threads --size 5m --shapes F8 --dtypes float32 --rounds 1 --csv FOLDER/other.csv",
        "checkout --other CHECKOUT --n 1 --rounds 1 --controllers chain --csv FOLDER/third.csv",
    ),
    "bench_host": ("--controllers tot --problems 2 --rounds 1 --csv FOLDER/out.csv",),
    "bench_exit": ("--size 5m --prompt 16 --leaves 2 --rounds 3 --json FOLDER/out.json",),
    "soak_server": ("--minutes 0.05 --clients 3 --shares plain=2 leave=1 --csv FOLDER/out.csv",),
    "bench_server": ("--clients 1 2 --requests 2 --tokens 4 --rounds 1 --csv FOLDER/out.csv",),
    "bench_sharing": ("--prefixes 8 40 --branches 2 --rounds 1 --json FOLDER/out.json",),
    "bench_sampling": ("--rows 2 --vocabularies 1500 --rounds 3 --json FOLDER/out.json",),
    "bench_budget": ("--n 1 --searches tot-dfs --budgets 0.5 --host --csv FOLDER/out.csv",),
    "bench_ratio": ("--n 1 --searches chain --together 2 --host --csv FOLDER/out.csv",),
    "bench_compressed": (
        "--size 5m --prompt 128 --part 0.5 --rounds 1 --tokens 4 --policies streaming h2o/32 snapkv/heads/32",
    ),
    "bench_concurrency": (
        "--problems 2 --rounds 1 --at-a-time 1 2 --only searches --csv FOLDER/out.csv",
        "--problems 2 --rounds 1 --at-a-time 1 2 --only lossy --csv FOLDER/out.csv",
    ),
    "bench_decode": (
        "--size 5m --shapes F8 --rounds 1 --deepcopy --layers --separate --loose --library LIBRARY --json FOLDER/out.json",
    ),
    "bench_dpts": (
        "--n 1 --verifiers exact --width 3 --visited 3 --json FOLDER/out.json",
        "--n 1 --verifiers self --task chains --width 2 --visited 2 --json FOLDER/out.json",
    ),
    "bench_peers": ("--peers generate --size 5m --shapes F8 --rounds 1 --csv FOLDER/out.csv",),
    "bench_engine": ("--rounds 1 --json FOLDER/out.json",),
    "bench_reward": ("--rounds 1 --depths 2 --problems 1 --csv FOLDER/out.csv",),
    "bench_trace": ("--problems 1 --nodes 60 --starts 1",),
    "bench_view": ("--nodes 40 --loads 1 --seeks 2 --json FOLDER/out.json",),
    "eval_attention": ("--n 1 --tasks chains --thresholds 0.001 --csv FOLDER/out.csv",),
    "eval_prompts": (),  # below
    "eval_chains": ("--n 1 --json FOLDER/out.json --svg FOLDER/out.svg",),
    "eval_policies": (
        "lossy --task chains --steps 2 2 --n 1 --budgets 0.9 --policies h2o --json FOLDER/out.json",
        "same --n 1 --searches beam --budgets 0.5 --json FOLDER/out.json",
        "lossless --n 1 --searches beam --budgets 0.5 --json FOLDER/out.json",
        "largest --n 1 --json FOLDER/out.json",
        "share --n 1 --blocks 174 --policies reentry --json FOLDER/out.json",
    ),
    "eval_sapling": ("--n 2 --tree 1 --words 1 --steps 2 --json FOLDER/out.json",),
    "eval_rksc": (
        "gates --n 8 --calibration 8 --csv FOLDER/gates.csv --json FOLDER/out.json",
        "layers --n 8 --calibration 8 --json FOLDER/out.json",
        "share --n 2 --json FOLDER/out.json",
        "pipeline --size 5m --prefix 40 --rounds 2 --json FOLDER/out.json",
        "searches --n 1 --rounds 1 --searches beam --json FOLDER/out.json",
    ),
    "eval_judges": (
        "--n 2 --samples 2 --temperature 1 --chains FOLDER/chains.jsonl --csv FOLDER/out.csv",
    ),
    "eval_search": ("--n 1 --json FOLDER/out.json",),
    "gpu_check": ("--device cpu --out FOLDER/rows.jsonl",),
    "picture": ("--check",),
    "bench_workers": (
        "--problems 2 --rounds 1 --at-a-time 1 --controller chain --csv FOLDER/out.csv",
    ),
    "bench_warm": ("--size 5m --prompt 70 --rounds 3 --csv FOLDER/out.csv",),
    "train_sapling": ("--minutes 0.02 --work FOLDER/work --out FOLDER/model --set hidden_size=64",),
}

# The same scripts with another model and other problems: SmolLM2, and a file of word problems.
PRETRAINED: dict[str, tuple[str, ...]] = {
    "bench_budget": ("--n 1 --searches tot-bfs --budgets 0.5",),
    "bench_ratio": ("--n 1 --searches chain --together 1",),
    "bench_concurrency": (
        "--only lossy --problems 1 --rounds 1 --at-a-time 1 2",
        "--only trees --problems 1 --deterministic no",
    ),
    "bench_dpts": ("--n 1 --verifiers self --width 2 --visited 2",),
    "bench_host": ("--controllers tot --problems 1 --rounds 1",),
    "bench_int8_weights": ("answers --n 1",),
    "bench_kv_int8": ("errors --n 1", "answers --n 1"),
    "bench_native": ("search --n 1 --rounds 1 --controllers chain",),
    "bench_reward": ("--only searches --problems 1",),
    "bench_server": ("--clients 1 --requests 1 --tokens 4 --rounds 1",),
    "bench_store": ("--n 1 --searches beam --stores host",),
    "bench_trace": ("--problems 1 --nodes 60 --starts 1",),
    "bench_workers": ("--problems 1 --rounds 1 --at-a-time 1 --workers 1 --controller chain",),
    "eval_attention": ("--n 1 --thresholds 0.001",),
    "eval_packed": ("chains --n 1 --bits 8 --schemes tensor",),
    "eval_policies": (
        "lossy --n 1 --budgets 0.9 --policies h2o",
        "same --n 1 --searches beam --budgets 0.5",
    ),
    "eval_rksc": ("searches --n 1 --rounds 1 --searches beam",),
    "eval_search": ("--n 1 --arms 'tot self'",),
    "eval_tiers": ("splits --n 1 --parts 1 0.5", "destroyed --n 1 --rules size"),
    "soak_server": ("--minutes 0.05 --clients 2 --shares plain=1 short=1",),
}
# They make a solver, and solve no problems that could be others.
OF_NO_PROBLEMS = {"bench_fetch", "bench_start"}

# Their own processes import them as the main module.
WITH_PROCESSES = ("train_sapling",)


def runs(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(name, arguments) for name, several in table.items() for arguments in several]


def check(name: str, arguments: str, folder: Path) -> None:
    if name == "bench_view" and chromium.program() is None:
        pytest.skip(chromium.MISSING)
    if name == "bench_workers":
        pytest.importorskip("ray", reason="the extra `ray` is not installed")
    for word, place in {"FOLDER": folder, "CHECKOUT": SCRIPTS.parent, "LIBRARY": FILE}.items():
        arguments = arguments.replace(word, str(place))
    given = shlex.split(arguments)
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
    if "out.svg" in arguments:
        assert (folder / "out.svg").read_text().rstrip().endswith("</svg>")


def test_no_script_is_left_out() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {*QUICK, *SLOW, *HELPERS}


@pytest.mark.parametrize(("name", "arguments"), runs(QUICK))
def test_a_script_runs(name: str, arguments: str, tmp_path: Path) -> None:
    check(name, arguments, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), runs(SLOW))
def test_a_long_script_runs(name: str, arguments: str, tmp_path: Path) -> None:
    check(name, arguments, tmp_path)


def test_every_script_that_searches_takes_a_model_and_a_data_set() -> None:
    searching = {
        path.stem
        for path in SCRIPTS.glob("*.py")
        if re.search(r'\bSolver\(|"serve"', path.read_text(encoding="utf-8"))
    }
    own = {"evidence", "eval_judges", "eval_prompts"}  # tests of their own run them
    left_out = searching - PRETRAINED.keys() - OF_NO_PROBLEMS - own
    assert not left_out, "add the options of model_and_problems.py, and a run"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "arguments"), runs(PRETRAINED))
def test_a_script_takes_another_model_and_other_problems(
    name: str, arguments: str, smollm2: Path, tmp_path: Path
) -> None:
    rows = [
        {"question": f"{i} boxes of 3 pens: how many pens?", "answer": f"#### {3 * i}"}
        for i in range(40)
    ]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    given = f"{arguments} --model {smollm2} --dataset FOLDER/problems.jsonl"
    check(name, f"{given} --task gsm8k,max_depth=2,max_tokens=12", tmp_path)


GSM8K_ROW = {"question": "Tom has 3 boxes of 4 pens. How many pens?", "answer": "#### 12"}
SMALL = (
    "--dataset FOLDER/problems.jsonl --task gsm8k --n 1 --tokens 60 --max-depth 2 --step-tokens 8 "
    "--threads 1 --out FOLDER/out --yes"
)


def checkpoint(folder: Path, family: str) -> str:
    """A random model of a family and one problem in a folder; the small run's arguments."""
    words = (" y", " n", " Y", " N")  # verdicts differ from their first token on
    tokenizer = byte_tokenizer(chat=True, merges=words)
    save(folder / family, "AutoModelForCausalLM", family, tokenizer)
    (folder / "problems.jsonl").write_text(json.dumps(GSM8K_ROW) + "\n", encoding="utf-8")
    return f"--model FOLDER/{family} {SMALL}"


def test_prompts_are_compared_on_the_chains_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").write_text(json.dumps(GSM8K_ROW) + "\n", encoding="utf-8")
    model = "--model builtin:sapling"
    given = f"{model} --dataset FOLDER/problems.jsonl --tokens 9 --dtype auto --out FOLDER/chains"

    check("eval_prompts", f"chains {given} --forms boxed hashes", tmp_path)
    chains = sorted((tmp_path / "chains").glob("*.jsonl"))
    check("eval_prompts", f"accuracy {chains[0]} --csv FOLDER/prompts.csv", tmp_path)

    assert [len(each.read_text("utf-8").splitlines()) for each in chains] == [1, 1]
    assert "boxed,1 to 1,0.0" in (tmp_path / "prompts.csv").read_text("utf-8")


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "out/records.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    text = (folder / f"out/{name}.csv").read_text("utf-8")
    assert str(folder) not in text, "rows name no path"
    return list(csv.DictReader(text.splitlines()))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_the_tables_of_a_checkpoint(family: str, tmp_path: Path) -> None:
    arguments = checkpoint(tmp_path, family)

    check("evidence", f"{arguments} --questions lossless lossy bits gates", tmp_path)

    # a quarter of so short a chain is less than what is protected
    failed = {record["arm"] for record in records(tmp_path) if record["error"]}
    if family == "gemma2":  # heads cannot hold different tokens where a layer has a window
        assert {arm for arm in failed if "/pyramidkv/" in arm}
        failed = {arm for arm in failed if "/pyramidkv/" not in arm}
    assert all(arm.startswith("lossy/chain/") and arm.endswith("/0.25") for arm in failed), failed
    page = (tmp_path / "out/report.md").read_text("utf-8")
    for name in ("lossless", "policies", "lossy", "bits"):
        rows = rows_of(tmp_path, name)
        assert all("--dataset problems.jsonl" in row["command"] for row in rows)
        assert rows and all(row["n"] == "1" and row["commit"] for row in rows), name
        assert f"Data: {name}.csv" in page
    for row in rows_of(tmp_path, "lossless"):
        assert row["over_budget"] == "0" and row["same_tree"] == "1", row
    assert "gates: 1 verified problems are too few to calibrate." in page


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tables_of_a_checkpoint_are_resumed_and_refuse_other_settings(tmp_path: Path) -> None:
    arguments = f"{checkpoint(tmp_path, 'llama')} --questions controllers bits"
    check("evidence", arguments, tmp_path)
    before = records(tmp_path)
    path = tmp_path / "out/records.jsonl"
    path.write_text(path.read_text("utf-8")[:-20], encoding="utf-8")  # the last line is torn

    check("evidence", arguments, tmp_path)

    assert records(tmp_path)[:-1] == before[:-1], "what was measured is kept"
    assert records(tmp_path)[-1]["arm"] == before[-1]["arm"], "the torn record is measured again"
    rows = rows_of(tmp_path, "controllers")
    assert [row["arm"] for row in rows][:2] == ["greedy", "best-of-4"]
    assert len({row["kv_tokens"] for row in rows}) == 1, "the same KV for every search"
    other = arguments.replace("--tokens 60", "--tokens 61").replace("FOLDER", str(tmp_path))
    done = warm_process.run(str(SCRIPTS / "evidence.py"), *other.split())
    assert done.returncode == 2 and "was measured with tokens 60" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_arms_that_several_processes_search_are_those_of_one(tmp_path: Path) -> None:
    words = "lossy --task chains --steps 2 2 --n 3 --budgets 0.75 --rehydrate off --baseline lru"
    found = []
    for jobs in ("1", "2"):
        out = tmp_path / f"{jobs}.json"
        command = [sys.executable, str(SCRIPTS / "eval_policies.py"), *words.split()]
        command += ["--policies", "lru", "random", "h2o", "--jobs", jobs, "--json", str(out)]
        subprocess.run(command, cwd=tmp_path, timeout=300, check=True, capture_output=True)
        found.append(json.loads(out.read_text(encoding="utf-8")))

    assert found[0] == found[1]
    assert [row["policy"] for row in found[0]["rows"]] == ["full", "lru", "random", "h2o"]
    assert "against_baseline" in found[0]["rows"][2]
