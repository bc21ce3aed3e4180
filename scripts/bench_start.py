"""CPU seconds of whole commands: misuse, plans, traces, a finished evaluation, a first block.

    python scripts/bench_start.py --n 5
    python scripts/bench_start.py --n 1 --commands misuse plan
    python scripts/bench_start.py --n 9 --commands import interface --csv start.csv --machine xeon

Every run is a process of its own, so imports count; a first run of each command writes bytecode and
is not counted. `first block` is a search that grows one leaf. `import` is Python importing a
package; `interface` the same search by the command and by `Solver`, which take turns. The trace and
the evaluation that other commands read are made before the measurement, with the built-in model.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiment_table import ExperimentTable, add_options

PUZZLE = "4 5 6 10"
ROOT = Path(__file__).parents[1]
TRACE, RUN = "run.arbor.jsonl", "run"
SOLVE = ["solve", PUZZLE]
EVAL = ["eval", "game24", "--limit", "1", "--output", RUN]

SOLVER = f"from arbor import Solver\nwith Solver() as solver: solver.solve('{PUZZLE}')"

# name -> arguments and exit code; those that begin with -c are Python's own
COMMANDS: dict[str, tuple[list[str], int]] = {
    "version": (["--version"], 0),
    "help": (["--help"], 0),
    "misuse: budget": ([*SOLVE, "--budget", "25"], 2),
    "misuse: policy": ([*SOLVE, "--policy", "arbokv"], 2),
    "misuse: dtype": ([*SOLVE, "--dtype", "float33"], 2),
    "misuse: device": ([*SOLVE, "--device", "tpu"], 2),
    "misuse: backend": ([*SOLVE, "--backend", "troch"], 2),
    "misuse: mode": ([*SOLVE, "--rehydrate", "off"], 2),
    "misuse: model": ([*SOLVE, "--model", "./nowhere"], 5),
    "misuse: setting": ([*SOLVE, "--set", "widht=3"], 2),
    "misuse: run-differs": ([*EVAL, "--seed", "1"], 2),
    "list": (["list"], 0),
    "info": (["info"], 0),
    "plan": ([*SOLVE, "--dry-run"], 0),
    "trace info": (["trace", "info", TRACE], 0),
    "replay": (["replay", TRACE], 0),
    "finished evaluation": (EVAL, 0),
    "first block": ([*SOLVE, "--set", "max_expansions=1"], 3),
    "import: torch": (["-c", "import torch"], 0),
    "import: transformers' Llama": (
        ["-c", "import torch; from transformers import LlamaForCausalLM"],
        0,
    ),
    "interface: command": (SOLVE, 0),
    "interface: Solver": (["-c", SOLVER], 0),
}


def run(arguments: list[str], folder: Path) -> tuple[int, float]:
    """Exit code and CPU seconds of a command in a process of its own."""
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    settings.pop("PYTHONDONTWRITEBYTECODE", None)  # no command would find any
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    module = [] if arguments[0] == "-c" else ["-m", "arbor"]
    command = [sys.executable, *module, *arguments]
    code = subprocess.run(command, cwd=folder, env=settings, capture_output=True).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return code, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(names: Sequence[str], n: int, folder: Path) -> list[dict[str, Any]]:
    """The CPU seconds of `n` runs each, which take turns, after one that is not counted."""
    runs: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for _ in range(n + 1):
        for name in names:
            runs[name].append(run(COMMANDS[name][0], folder))
    return [row(name, runs[name]) for name in names]


def row(name: str, runs: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """The figures of one command; the first run does not count."""
    code, expected = runs[-1][0], COMMANDS[name][1]
    assert code == expected, f"{name}: exit code {code}, not {expected}"
    seconds = [taken for _, taken in runs[1:]]
    return {
        "what": name,
        "state": "now",
        "goal_s": "",
        "median_s": round(statistics.median(seconds), 3),
        "low_s": round(min(seconds), 3),
        "high_s": round(max(seconds), 3),
        "n": len(seconds),
        "n_of": "runs",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=5, help="runs counted of each command")
    parser.add_argument("--commands", nargs="+", default=[""], help="names begin with one of these")
    add_options(parser)
    given = parser.parse_args()
    names = [name for name in COMMANDS if name.startswith(tuple(given.commands))]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        used = {word for name in names for word in COMMANDS[name][0]}
        if TRACE in used:
            run([*SOLVE, "--trace", TRACE], folder)
        if RUN in used:
            run(EVAL, folder)
        turns = [[name for name in names if name.startswith("interface")]]
        turns += [[name] for name in names if name not in turns[0]]
        table = ExperimentTable(given)
        for group in filter(None, turns):
            for found in measure(group, given.n, folder):
                table.show(found)


if __name__ == "__main__":
    main()
