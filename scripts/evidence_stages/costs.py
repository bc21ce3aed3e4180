"""What the tables of a model will cost, from its config alone: searches, tokens, hours.

A forward pass of a decoder reads every weight once, and multiplies every weight with each of its
rows, so on a machine it takes at least (the roofline of Williams et al., CACM 2009)

    seconds of a forward = max(weight bytes / bandwidth, 2 x parameters x rows / FLOP/s)
    forwards             = tokens / rows

with rows the thoughts that decode together. Tokens are at most those of the plan (`most_tokens`).
In lossless mode a budget below the peak multiplies the time by what was measured for such a search
(docs/experiments/budget_cost.csv). Left out: prompts, the reading of KV, verification, and
everything a machine does not reach of its peaks. So hours are a lower bound at these tokens, and
tokens are an upper bound; the time that is left is measured while it runs.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from arbor import Solver
from arbor.kernels.linear.blocks import BlockWeight, encode_q8_0, multiply
from arbor.model.model_info import ModelInfo
from controllers.chain import Chain

from .arms import CONTROLLERS, ROWS, SEARCHES, TOGETHER, Arm, reference

BUDGET_COST = Path(__file__).parents[2] / "docs" / "experiments" / "budget_cost.csv"
MEASURED = {"tot-dfs": "tot depth-first", "tot-bfs": "tot breadth-first"}
LEAST_PART = 0.125  # about what one path of a tree is
RECORDED = {"attention": ("chain", 1), "gates": ("tot-bfs", 1), "weights": ("chain", 3)}  # times
MEASURED_BYTES = 1 << 28
MEASURED_SIDE = 1024  # of a square matrix
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Machine:
    """What a roofline needs of a machine.

    Attributes:
        name: for people.
        bandwidth: bytes a second from memory.
        flops: floating-point operations a second; None: not known, so forwards only read.
    """

    name: str
    bandwidth: float
    flops: float | None = None

    def forward_s(self, info: ModelInfo, rows: int) -> float:
        """Seconds of a forward pass, at least."""
        reads = info.parameters * BYTES.get(info.dtype, 4) / self.bandwidth
        return max(reads, 2 * info.parameters * rows / self.flops) if self.flops else reads


@dataclass(frozen=True)
class Cost:
    """Searches of one experiment that decode equally many rows."""

    question: str
    searches: int
    tokens: int
    rows: int
    slower: float = 1.0

    def hours(self, machine: Machine, info: ModelInfo) -> float:
        """On a machine, at least."""
        return self.tokens / self.rows * machine.forward_s(info, self.rows) * self.slower / 3600


def measured_machine(device: torch.device, dtype: str, threads: int | None) -> Machine:
    """This machine: the best of three reads of 256 MiB and of three matrix products, on a CPU those
    of arbor's kernels: torch's of bfloat16 are slow where the CPU has none.

    Args:
        device: of the model.
        dtype: of its weights.
        threads: of torch on a CPU; None: its own number.
    """
    kind: torch.dtype = getattr(torch, dtype)
    memory = torch.ones(MEASURED_BYTES // 8, dtype=torch.int64, device=device)
    square = torch.ones(MEASURED_SIDE, MEASURED_SIDE, dtype=kind, device=device)
    weight = encode_q8_0(square) if device.type == "cpu" else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        read = min(_seconds(device, memory.sum) for _ in range(3))
        product = min(_seconds(device, lambda: _product(square, weight)) for _ in range(3))
    finally:
        torch.set_num_threads(before)
    return Machine("this machine", MEASURED_BYTES / read, 2 * MEASURED_SIDE**3 / product)


def _product(square: torch.Tensor, weight: BlockWeight | None) -> torch.Tensor:
    return square @ square if weight is None else multiply(square, weight, None)


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def most_tokens(solver: Solver) -> int:
    """Most tokens that a search of this solver generates: of chains what a path may have, of trees,
    whose paths are not known before, blocks times tokens of a thought."""
    limits = solver.boundary
    blocks = solver.controller.max_blocks(limits.max_depth)
    if isinstance(solver.controller, Chain):
        return blocks // limits.max_depth * limits.longest_path
    return blocks * limits.max_tokens


def slower(arm: Arm) -> float:
    """The time of an arm next to full retention's, as the newest row for such a search has it."""
    if arm.lossy or arm.part == 1 or arm.search not in MEASURED:
        return 1.0
    with BUDGET_COST.open(encoding="utf-8", newline="") as lines:
        rows = [
            row
            for row in csv.DictReader(lines)
            if row["controller"].startswith(MEASURED[arm.search])
            and row["budget_fraction"]
            and float(row["budget_fraction"]) == arm.part
            and row["ratio_to_full"]
        ]
    return float(rows[-1]["ratio_to_full"]) if rows else 1 / max(arm.part, LEAST_PART)


def costs_of(
    arms: Sequence[Arm],
    solvers: dict[str, Solver],
    experiments: Sequence[str],
    problems: int,
    controller_tokens: int,
    at_once: int = 1,
) -> list[Cost]:
    """What every experiment costs.

    Args:
        arms: of the experiments that have any.
        solvers: from the name of a search to a solver of it.
        experiments: by name.
        problems: of the dataset.
        controller_tokens: most of each search of `controllers`.
        at_once: problems in progress at a time where they lose KV.
    """
    found = []
    if "controllers" in experiments:
        found += [
            Cost("controllers", problems, problems * controller_tokens, rows)
            for _, rows in CONTROLLERS.values()
        ]
    used = [name for name in SEARCHES if any(arm.search == name for arm in arms)]
    for arm in [*map(reference, used), *arms]:
        tokens = problems * most_tokens(solvers[arm.search])
        rows = ROWS[arm.search] * (min(at_once, problems) if arm.question in TOGETHER else 1)
        found.append(Cost(arm.question, problems, tokens, rows, slower(arm)))
    for name in (each for each in experiments if each in RECORDED):
        search, times = RECORDED[name]
        tokens = times * problems * most_tokens(solvers[search])
        found.append(Cost(name, times * problems, tokens, ROWS[search]))
    return found


def cost_lines(
    info: ModelInfo, costs: Iterable[Cost], machines: Sequence[Machine], problems: int
) -> list[str]:
    """The costs as a table, with the formula."""
    every = list(costs)
    size = info.parameters * BYTES.get(info.dtype, 4)
    lines = [
        f"{info.id}: {info.parameters / 1e6:,.0f} million parameters, {info.dtype}, "
        f"{size / 1e9:.2f} GB of weights, {info.kv_bytes_per_token / 1024:.0f} KiB of KV a token",
        f"{problems} problems",
        f"{'experiment':12} {'searches':>9} {'tokens, at most':>16}"
        + "".join(f" {'hours, ' + each.name:>24}" for each in machines),
    ]
    for name in (*dict.fromkeys(cost.question for cost in every), "all"):
        mine = [cost for cost in every if name in (cost.question, "all")]
        hours = [sum(cost.hours(machine, info) for cost in mine) for machine in machines]
        lines.append(
            f"{name:12} {sum(c.searches for c in mine):9,} {sum(c.tokens for c in mine):16,}"
            + "".join(f" {value:24.3g}" for value in hours)
        )
    for machine in machines:
        flops = "not given" if machine.flops is None else f"{machine.flops / 1e9:,.0f} GFLOP/s"
        lines.append(f"{machine.name}: {machine.bandwidth / 1e9:,.1f} GB/s, {flops}")
    return [
        *lines,
        "hours: (tokens / rows) x max(weight bytes / bandwidth, 2 x parameters x rows / FLOP/s) x "
        "the time at the budget (docs/experiments/budget_cost.csv), at least; prompts, "
        "verification and KV are left out, and most searches generate fewer tokens",
    ]
