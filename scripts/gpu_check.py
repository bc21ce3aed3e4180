"""Check arbor on a CUDA machine, and measure it against its floors: one command, nine minutes.

    python scripts/gpu_check.py --bundle build/gpu-bundle --out gpu.jsonl
    python scripts/gpu_check.py --device cpu        # small: shows only that the checks run
    python scripts/gpu_check.py --stages 1,2        # some of the stages
    python scripts/gpu_check.py --report gpu.jsonl  # the tables of a run, once more
    python scripts/gpu_check.py --report gpu.jsonl --csv docs/experiments/gpu.csv --machine h200

Needs no network and no installation: it runs from a checkout. Each part of a stage is a process
with a time limit; one that fails, hangs or dies does not stop the next. Every row is on disk as
soon as it is known. Stages, in the order in which they run:

    1  versions, modules, and one tiny attention per kernel
    2  attention of every backend against float64 on short lists of keys
    4  the engine against the model's own forward, and a small budget against a full one
    3  bandwidth and peak, for the floors
    8  tree attention in two launches against FlashInfer's cascade
    5  decode steps at the shapes of Llama-3.1-8B and Qwen2.5-7B, and of transformers
    7  Sapling's answers against those of the CPU
    6  the host's work in a step

Exit code: 0 if every check passed and the backend of --require was among what was checked, 1 if
not, 2 for an invalid argument or without a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from experiment_table import ExperimentTable, add_options  # noqa: E402
from gpu_stages.processes import RESERVE, Part, rows_since, run_all, verdict  # noqa: E402
from gpu_stages.report import render  # noqa: E402
from gpu_stages.rows import Job, read  # noqa: E402
from gpu_stages.table import numbers  # noqa: E402

PARTS = (
    Part(1, "environment", "all", 30),
    Part(2, "attention", "flashinfer", 45, cuda_only=True),
    Part(2, "attention", "torch", 35),
    Part(2, "attention", "triton", 45, cuda_only=True),
    Part(2, "attention", "rowwise", 40),
    Part(4, "agreement", "all", 45),
    Part(3, "peaks", "all", 20, cuda_only=True),
    Part(8, "trees", "all", 45),
    Part(5, "decode", "llama", 130),
    Part(5, "decode", "transformers", 30),
    Part(7, "search", "all", 55),
    Part(6, "host", "all", 35),
    Part(5, "decode", "qwen", 75, cuda_only=True),
)
TOTAL_S = 540.0  # of all parts
CHECKING = ("attention", "agreement", "search")  # stages that check a backend's results


def main() -> int:
    arguments = parse()
    if arguments.report:
        rows = read(arguments.report)
        print(render(rows))
        save(rows, arguments)
        return 0
    if arguments.part:
        return run_here(arguments)
    return run(arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--stages", type=stages, metavar="1,4", help="only these stages")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_check.jsonl"), metavar="FILE", help="rows go there"
    )
    parser.add_argument(
        "--bundle", type=Path, metavar="DIR", help="FlashInfer from scripts/gpu_bundle.py"
    )
    parser.add_argument(
        "--require",
        choices=("triton", "flashinfer", "torch", "none"),
        help="exit with 1 unless results of this backend were checked; by default triton on cuda "
        "and torch on a CPU",
    )
    parser.add_argument(
        "--slower", type=float, help="factor on every time limit; by default 1, and 4 on a CPU"
    )
    parser.add_argument("--seed", type=int, help="repeats the random numbers of another run")
    parser.add_argument("--report", type=Path, metavar="FILE", help="render the tables of FILE")
    add_options(parser)
    parser.add_argument("--commit", help="that ran, for the table; by default the one checked out")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bundle and not (arguments.bundle / "flashinfer").is_dir():
        parser.error(f"--bundle {arguments.bundle}: there is no FlashInfer in it")
    if arguments.report and not arguments.report.is_file():
        parser.error(f"--report {arguments.report}: no such file")
    if arguments.seed is None:
        arguments.seed = int(time.time())
    if arguments.slower is None:
        arguments.slower = 4.0 if arguments.device == "cpu" else 1.0
    if arguments.require is None:
        arguments.require = "triton" if arguments.device == "cuda" else "torch"
    return arguments


def stages(text: str) -> set[int]:
    """``1,4`` as numbers of stages."""
    known = {str(part.number) for part in PARTS}
    words = set(text.split(","))
    if not words <= known:
        raise argparse.ArgumentTypeError(
            f"{text}: stages are numbers from {', '.join(sorted(known))}"
        )
    return {int(word) for word in words}


def run(arguments: argparse.Namespace) -> int:
    """Run the parts, print the tables, and return the exit code."""
    if arguments.device == "cuda" and not has_cuda():
        print("gpu_check: torch sees no CUDA device", file=sys.stderr)
        return 2
    out: Path = arguments.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    before = len(read(out)) if out.exists() else 0
    chosen = [
        part
        for part in PARTS
        if (arguments.stages is None or part.number in arguments.stages)
        and not (part.cuda_only and arguments.device == "cpu")
    ]
    limited = [replace(part, limit_s=part.limit_s * arguments.slower) for part in chosen]

    commands = [(part, command(part, arguments, out)) for part in limited]
    total_s = TOTAL_S * arguments.slower
    run_all(commands, out, environment(arguments.bundle, arguments.device), total_s)
    rows = rows_since(out, before)
    print(render(rows))
    save(rows, arguments)
    reasons = verdict(rows, arguments.require, CHECKING)
    for reason in reasons:
        print(f"gpu_check: {reason}", file=sys.stderr)
    return 1 if reasons else 0


def save(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Append what was measured to the table of ``--csv``."""
    stages = arguments.stages or {part.number for part in PARTS}
    command = "gpu_check.py --stages " + ",".join(map(str, sorted(stages)))
    table = ExperimentTable(arguments, command)
    for row in numbers(rows):
        table.add(row)


def has_cuda() -> bool:
    """Whether torch sees a GPU; the only use of torch in this process."""
    import torch

    return torch.cuda.is_available()


def command(part: Part, arguments: argparse.Namespace, out: Path) -> list[str]:
    """The command of a part's process."""
    return [
        *(sys.executable, str(Path(__file__).resolve()), "--part", f"{part.stage}.{part.part}"),
        *("--device", arguments.device, "--out", str(out), "--seed", str(arguments.seed)),
        *("--seconds", str(RESERVE * part.limit_s)),
    ]


def environment(bundle: Path | None, device: str) -> dict[str, str]:
    """Environment of the parts: the checkout and the bundle come before what is installed."""
    folders = [str(ROOT)]
    added = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if bundle is not None:
        folders.insert(0, str(bundle.resolve()))
        added |= {"FLASHINFER_DISABLE_JIT": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if device == "cpu":
        added["CUDA_VISIBLE_DEVICES"] = ""
        added["OMP_NUM_THREADS"] = "1"
    if os.environ.get("PYTHONPATH"):
        folders.append(os.environ["PYTHONPATH"])
    return {**os.environ, **added, "PYTHONPATH": os.pathsep.join(folders)}


def run_here(arguments: argparse.Namespace) -> int:
    """Run one part in this process."""
    stage, part = arguments.part.split(".")
    job = Job(stage, part, arguments.device, arguments.out, arguments.seconds, arguments.seed)
    logging.getLogger("arbor").addHandler(Warnings(job))
    with job.checking("stage"):
        importlib.import_module(f"gpu_stages.{stage}").run(job)
    return 0


class Warnings(logging.Handler):
    """Rows of what arbor warns about: kernels or graphs that it does without."""

    def __init__(self, job: Job) -> None:
        super().__init__(logging.WARNING)
        self._job = job

    def emit(self, record: logging.LogRecord) -> None:
        self._job.row("warning", status="warning", reason=record.getMessage()[:500])


if __name__ == "__main__":
    sys.exit(main())
