"""The tables of this project for a model and a dataset of your own, with one command.

    python scripts/evidence.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k --dry-run
    python scripts/evidence.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k --n 100 --yes
    python scripts/evidence.py --model ./m.gguf --dataset problems.jsonl --task gsm8k \\
        --experiments 1 2 10 --n 20 --yes

First the expected cost: searches, tokens, and hours on this machine, and on a GPU whose bandwidth
is given (`--gpu-bandwidth`), with the formula. Nothing is searched without `--yes`.

     1  paths        answers of one chain at 0.75, 0.5 and 0.25 of its KV, by policy, all with the
                     same protection
     2  lossless     time, recomputed and fetched tokens at a half and a quarter of what full
                     retention holds at the time, and with room for one expansion, with and without
                     host memory; a path of which a half or a quarter is on the device; and other
                     policies, replayed
     3  attention    how often tokens of a chain are read again, and how few hold the attention
     4  gates        which verifications RKSC's gates skip or shorten, how many then prefer another
                     thought, and the time
     5  sharing      how similar prompts are, and whether one changed number is told apart
     6  hierarchy    answers where 3, 10 and 50 % of a chain are destroyed, of all or at each event
     7  bits         answers with host memory in 8 and 4 bits, and (on a CPU) 8-bit KV
     8  weights      MSVE fitted to the blocks of right chains (msve.json), and `--fitted` elsewhere
     9  trees        answers of two tree searches at 0.75, 0.5 and 0.25 of their peaks, by policy
    10  controllers  `arbor compare`: ten searches at the same generated tokens and the same KV

`--experiments 2 3 10` measures some of them, `--arms 'trees/*/0.5'` some of their arms.

Every problem is searched by every arm, with full retention first, whose peak the budgets are parts
of. A record is on disk as soon as it is known; the same command goes on where it stopped. The
folder then holds a CSV file for each table, and `report.md`: what these rows say to take, as in
docs/which.md. Times are processor time on a CPU and wall time on a GPU, arms of a problem in turn.

Exit code: 0, 2 without `--yes` or for an invalid argument, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from evidence_stages.arms import (  # noqa: E402
    CONTROLLERS,
    EXPERIMENTS,
    SEARCHES,
    TOGETHER,
    Arm,
    arms_of,
)
from evidence_stages.costs import (  # noqa: E402
    Machine,
    cost_lines,
    costs_of,
    measured_machine,
)
from evidence_stages.measuring import Measuring, Records  # noqa: E402
from evidence_stages.page import page  # noqa: E402
from evidence_stages.recording import Recording  # noqa: E402
from evidence_stages.tables import Measured, write_tables  # noqa: E402
from model_and_problems import DATASETS  # noqa: E402

from arbor import Solver  # noqa: E402
from arbor.cli.evaluation.eval_dataset import is_task, read_samples  # noqa: E402
from arbor.cli.evaluation.eval_options import DatasetOptions  # noqa: E402
from arbor.errors import ArborError, UsageError  # noqa: E402
from arbor.measure.evaluation.dataset import Sample  # noqa: E402
from arbor.papers.arborkv.msve import MSVE  # noqa: E402
from arbor.support.atomic_write import write_atomically  # noqa: E402

SETTINGS = "evidence.json"
RECORDS = "records.jsonl"
REPORT = "report.md"
FITTED = "8: msve.json of other folders, whose weights are tried on these problems too"


def main() -> int:
    """The cost, then the measurements and their tables."""
    args = arguments()
    try:
        return run(args)
    except ArborError as error:
        hint = f" {error.hint}" if error.hint else ""
        print(f"evidence.py: error: [{error.code}] {error.message}{hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="an id on the Hub, a directory, or a GGUF file"
    )
    parser.add_argument("--revision", help="of a model of the Hub")
    parser.add_argument(
        "--dataset", required=True, help=f"{', '.join(DATASETS)}, a task, a file, or hf:…"
    )
    parser.add_argument("--task", help="reads and grades a file's problems; default: reasoning")
    parser.add_argument("--split", help="of a task's own problems (test), or of a data set (all)")
    parser.add_argument("--n", type=int, default=100, help="problems, the first of the dataset")
    parser.add_argument(
        "--experiments",
        nargs="+",
        type=int,
        choices=list(EXPERIMENTS),
        default=list(EXPERIMENTS),
        help="by their numbers above; default: all",
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["*"],
        metavar="GLOB",
        help="those whose EXPERIMENT/SEARCH/NAME/PART matches one, and what they are compared with;\n"
        "default: all",
    )
    parser.add_argument("--fitted", nargs="+", type=Path, default=[], metavar="FILE", help=FITTED)
    parser.add_argument("--tokens", type=int, default=1024, help="of each search of `controllers`")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=8,
        help="problems in progress at a time in experiments that are not timed",
    )
    parser.add_argument("--max-depth", type=int, help="thoughts of a path, instead of the task's")
    parser.add_argument("--step-tokens", type=int, help="of a thought, instead of the task's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="of torch, on a CPU")
    parser.add_argument(
        "--gpu-bandwidth", type=float, metavar="GB/s", help="of a GPU to estimate for"
    )
    parser.add_argument("--gpu-tflops", type=float, metavar="TFLOP/s", help="of that GPU")
    parser.add_argument("--out", type=Path, help="folder, new or to go on with")
    parser.add_argument("--machine", default="", help="as the rows name it; default: its processor")
    parser.add_argument("--conditions", default="", help="what else ran, for the rows")
    parser.add_argument("--dry-run", action="store_true", help="print the cost only")
    parser.add_argument("--yes", action="store_true", help="search after printing the cost")
    args = parser.parse_args()
    args.experiments = [EXPERIMENTS[number] for number in sorted(set(args.experiments))]
    for name in ("n", "tokens", "concurrency"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; give 1 or more")
    for name in ("gpu_bandwidth", "gpu_tflops"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; give more than 0")
    if args.gpu_tflops and not args.gpu_bandwidth:
        parser.error("--gpu-tflops needs --gpu-bandwidth, as in --gpu-bandwidth 3350")
    if args.dry_run and args.yes:
        parser.error("--dry-run searches nothing and --yes searches; give one of them")
    return args


def run(args: argparse.Namespace) -> int:
    """Print the cost; with `--yes` measure what is missing, and write tables and page.

    Raises:
        ArborError: an invalid model, dataset or setting, or a folder of another run.
    """
    dataset, task = DATASETS.get(args.dataset, (args.dataset, args.task))
    task = task or (dataset if is_task(dataset) else "reasoning")
    common: dict[str, Any] = {
        "model": args.model,
        "revision": args.revision,
        "task": task,
        "max_depth": args.max_depth,
        "step_tokens": args.step_tokens,
        "seed": args.seed,
        "device": args.device,
        "dtype": args.dtype,
        "threads": args.threads,
        "record_bytes": 0,
    }
    plain = {name: Solver(**{**common, **SEARCHES[name]}) for name in SEARCHES}
    first = next(iter(plain.values()))
    info = first.describe()
    if not info.supported:
        raise UsageError("arch-unsupported", info.reason, "See 'arbor info MODEL'.")
    device = first.device
    options = DatasetOptions(dataset=dataset, split=args.split, limit=str(args.n))
    samples = read_samples(options, first.task, stop_on_error=True)
    arms = chosen(arms_of(args.experiments, device.type), args.arms)
    for path in args.fitted:
        MSVE.load(path)  # a wrong file is refused before anything is searched
    machines = [measured_machine(device, info.dtype, args.threads)]
    if args.gpu_bandwidth:
        flops = args.gpu_tflops * 1e12 if args.gpu_tflops else None
        machines.append(Machine("the GPU", args.gpu_bandwidth * 1e9, flops))
    costs = costs_of(arms, plain, args.experiments, len(samples), args.tokens, args.concurrency)
    cost = "\n".join(cost_lines(info, costs, machines, len(samples)))
    print(cost, flush=True)
    if args.dry_run:
        return 0
    if not args.yes:
        print("nothing was searched; add --yes to go on, or --dry-run", file=sys.stderr)
        return 2
    folder = args.out or new_folder(args)
    keep_settings(folder, common | {"dataset": dataset, "tokens": args.tokens})
    if "controllers" in args.experiments:
        compare(args, common, dataset, samples, plain, folder / "controllers")
    measuring = Measuring(common, Records(folder / RECORDS))
    recording = Recording(measuring, samples)
    for name in args.experiments:
        recording.record(name)
        mine = [arm for arm in arms if arm.question == name]
        measure_all(measuring, mine, samples, args.concurrency)
    args.machine = args.machine or machine_name(device)
    measured = Measured(
        measuring.records,
        [each.id for each in samples],
        device.type,
        name_of(args.model),
        name_of(args.dataset),
        args.fitted,
    )
    rows, notes = write_tables(folder, measured, arms, args.experiments, args, command_of(args))
    settings = {
        "task": task,
        "problems": len(samples),
        "seed": args.seed,
        "machine": args.machine,
        "conditions": args.conditions,
        "command": f"`{command_of(args)}`",
    }
    text = page(f"{name_of(args.model)} on {name_of(args.dataset)}", settings, rows, notes, cost)
    write_atomically(folder / REPORT, text)
    print(folder / REPORT)
    return 0


def chosen(arms: Sequence[Arm], globs: Sequence[str]) -> list[Arm]:
    """The arms whose key matches one of these globs, in the order of the globs, after those with
    room for everything that they are compared with.

    Raises:
        UsageError: a glob matches none.
    """
    found: dict[str, Arm] = {}
    for glob in globs:
        matching = {arm.key: arm for arm in arms if fnmatch.fnmatchcase(arm.key, glob)}
        if not matching and glob != "*":
            hint = f"Arms are named as in {arms[0].key!r}." if arms else "Name another experiment."
            raise UsageError("no-such-arm", f"--arms {glob!r} matches no arm.", hint)
        found |= matching
    compared = {
        (arm.question, arm.search, name) for arm in found.values() for name in (arm.name, "full")
    }
    roomy = [
        arm for arm in arms if arm.part == 1 and (arm.question, arm.search, arm.name) in compared
    ]
    return [*(arm for arm in roomy if arm.key not in found), *found.values()]


def new_folder(args: argparse.Namespace) -> Path:
    """``runs/evidence_{model}_{dataset}``."""
    named = (name_of(each).replace("/", "-") for each in (args.model, args.dataset))
    return Path("runs") / "_".join(("evidence", *named))


def keep_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write the run's settings, or check that they are those of the folder.

    Raises:
        UsageError: the folder holds records of other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTINGS
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        differ = [name for name in settings if known.get(name) != settings[name]]
        if differ:
            was = ", ".join(f"{name} {known.get(name)}" for name in differ)
            raise UsageError(
                "run-differs",
                f"{folder} was measured with {was}.",
                "Give the same, or name another folder with --out.",
            )
    write_atomically(path, json.dumps(settings, indent=1) + "\n")


def compare(
    args: argparse.Namespace,
    common: dict[str, Any],
    dataset: str,
    samples: Sequence[Sample],
    solvers: dict[str, Solver],
    folder: Path,
) -> None:
    """`arbor compare`, at half of the longest prompt and `--tokens`, or the least that every
    search can run in.

    Raises:
        KeyboardInterrupt: it was interrupted.
        UsageError: it failed; its own message stands above.
    """
    plans = [next(iter(solvers.values())).plan(each.problem) for each in samples]
    longest = max(plan.prompt_tokens for plan in plans)
    asked = [plan.enough_tokens for plan in plans]
    budget = max((longest + args.tokens) // 2, *asked)
    words = ["compare", dataset, "--task", common["task"], "--model", args.model]
    for name, (search, _) in CONTROLLERS.items():
        words += ["--arm", f"{name}={search}"]
    words += ["--tokens", str(args.tokens), "--budget", f"{budget}tok", "--limit", str(args.n)]
    words += ["--seed", str(args.seed), "--trace", "off", "--on-error", "continue"]
    words += ["--device", args.device, "--dtype", args.dtype, "--output", str(folder)]
    if args.split is not None:
        words += ["--split", args.split]
    for name in ("revision", "max_depth", "step_tokens", "threads"):
        if getattr(args, name) is not None:
            words += ["--set", f"{name}={getattr(args, name)}"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "arbor", *words],
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    if done.returncode in (130, -2):
        raise KeyboardInterrupt
    if done.returncode:
        raise UsageError(
            "compare-failed",
            f"'arbor compare' ended with exit code {done.returncode}.",
            "Its message stands above; the same command goes on where it stopped.",
        )


def measure_all(
    measuring: Measuring,
    arms: Sequence[Arm],
    samples: Sequence[Sample],
    at_once: int,
) -> None:
    """Every arm of an experiment on every problem, with the time that is left as measured so far;
    where times count, one problem at a time."""
    together = [arm for arm in arms if arm.question in TOGETHER]
    alone = [arm for arm in arms if arm not in together]
    began = time.perf_counter()
    solved = 0
    for place, sample in enumerate(samples):
        needed = bool(measuring.missing(alone, sample))
        measuring.measure(alone, sample, place)
        if needed:
            solved += 1
            each = (time.perf_counter() - began) / solved
            left = each * (len(samples) - place - 1) / 3600
            print(
                f"problem {place + 1} of {len(samples)}: {each:.1f} s a problem, "
                f"about {left:.2f} hours left",
                flush=True,
            )
    began = time.perf_counter()
    searched = 0
    for place, arm in enumerate(together, 1):
        found = measuring.measure_together(arm, samples, at_once)
        searched += bool(found)
        if found:
            left = (time.perf_counter() - began) / searched * (len(together) - place) / 3600
            print(
                f"{arm.key}: {found} problems; arm {place} of {len(together)}, about {left:.2f} "
                "hours left",
                flush=True,
            )


def command_of(args: argparse.Namespace) -> str:
    """The command that repeats the rows, with the names of files and folders only."""
    words = ["evidence.py", "--model", name_of(args.model), "--dataset", name_of(args.dataset)]
    for name in ("revision", "task", "max_depth", "step_tokens", "threads"):
        if getattr(args, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    words += ["--n", str(args.n), "--tokens", str(args.tokens), "--seed", str(args.seed)]
    if args.experiments != list(EXPERIMENTS.values()):
        numbers = (str(n) for n, name in EXPERIMENTS.items() if name in args.experiments)
        words += ["--experiments", *numbers]
    if args.arms != ["*"]:
        words += ["--arms", *args.arms]
    return shlex.join([*words, "--yes"])


def name_of(path: str) -> str:
    """The last part of a directory or file; an id on the Hub, or another name, as it is."""
    return Path(path).resolve().name if Path(path).exists() else path


def machine_name(device: torch.device) -> str:
    """The GPU, or the processor as the system names it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


if __name__ == "__main__":
    sys.exit(main())
