"""Arms: the ways in which each problem is searched, by the question that they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# The searches of every question but the first. Those of small models are wider
# (scripts/eval_policies.py); a thought of a larger one takes more lines.
SEARCHES: Mapping[str, Mapping[str, Any]] = {
    "chain": {"controller": "chain", "sampling": {"temperature": 0.0}},
    "tot-dfs": {
        "controller": {
            "name": "tot",
            "strategy": "dfs",
            "width": 4,
            "max_per_state": 2,
            "max_visited": 12,
        }
    },
    "tot-bfs": {"controller": {"name": "tot", "beam": 3, "width": 4, "stop_value": None}},
}
ROWS: Mapping[str, int] = {"chain": 1, "tot-dfs": 4, "tot-bfs": 12}  # that decode together

# Label -> what `arbor compare` reads, and the rows that decode together; the first is the baseline.
CONTROLLERS: Mapping[str, tuple[str, int]] = {
    "greedy": ("chain;temperature=0", 1),
    "best-of-4": ("best-of-n,samples=4;aggregate=majority", 4),
    "tot-dfs": ("tot,strategy=dfs,width=4", 4),
    "tot-bfs": ("tot,beam=3,width=4", 12),
    "beam": ("beam,beam_size=3,width=4", 12),
    "rebase": ("rebase,width=4", 4),
    "mcts": ("mcts", 4),
    "dpts": ("dpts", 4),
}

LOSSLESS_PARTS = (0.5, 0.25, 0.125)
LOSSY_PARTS = (0.75, 0.5, 0.25)
REPLAYED = ("reentry", "lru", "belady")
TREE_POLICIES = ("ends", "uniform", "lru", "h2o", "arborkv")
PATH_POLICIES = ("lru", "pyramidkv", "keydiff", "strata", "h2o", "ams-each", "lazyeviction-each")
HOST = "1000000tok"  # room for every search
STAGING = 64  # tokens
REFERENCE = "reference"


@dataclass(frozen=True)
class Arm:
    """One way in which every problem is searched.

    Attributes:
        question: whose table has its row.
        search: of `SEARCHES`.
        name: among the arms of this question, search and part.
        part: of what full retention of the same problem held at its peak.
        settings: of the solver, next to those of the search.
        policy: one of scripts/eval_policies.py, all with the same protection; empty: the default.
    """

    question: str
    search: str
    name: str
    part: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    policy: str = ""

    @property
    def key(self) -> str:
        """What records name it by."""
        return f"{self.question}/{self.search}/{self.name}/{self.part:g}"

    @property
    def lossy(self) -> bool:
        """Whether tokens of running paths may be lost."""
        return self.settings.get("mode") == "lossy"


def reference(search: str) -> Arm:
    """Full retention, which is searched before every other arm of its search: its peak is what
    budgets are parts of, and its recording is replayed under other policies."""
    return Arm(REFERENCE, search, "full")


def lossless() -> list[Arm]:
    """What a budget costs, with and without host memory; and a path longer than the budget."""
    arms = []
    for search in ("tot-dfs", "tot-bfs"):
        arms.append(Arm("lossless", search, "full"))
        for part in LOSSLESS_PARTS:
            arms.append(Arm("lossless", search, "device", part))
            arms.append(Arm("lossless", search, "host", part, {"host": HOST}))
    staged = {"host": HOST, "staging": f"{STAGING}tok", "fetch": "always"}
    arms.append(Arm("lossless", "chain", "full"))
    arms += [Arm("lossless", "chain", "staging", part, staged) for part in (0.5, 0.25)]
    return arms


def lossy() -> list[Arm]:
    """What lost KV costs in a tree whose paths fit, and on a path that does not fit."""
    gone = {"mode": "lossy", "rehydrate": "off"}
    back = {"mode": "lossy", "rehydrate": "selective"}
    arms = []
    for part in LOSSY_PARTS:
        arms += [Arm("lossy", "tot-bfs", each, part, gone, each) for each in TREE_POLICIES]
        arms.append(Arm("lossy", "tot-bfs", "arborkv, comes back", part, back, "arborkv"))
        arms += [Arm("lossy", "chain", each, part, gone, each) for each in PATH_POLICIES]
    return arms


def bits(device: str) -> list[Arm]:
    """What fewer bits cost, in host memory and on the device.

    Args:
        device: of the model; only a CPU reads 8-bit KV.
    """
    arms = []
    for host_bits in (8, 4):
        packed = {"mode": "lossy", "rehydrate": "selective", "host": HOST, "host_bits": host_bits}
        name = f"host, {host_bits} bits"
        arms.append(Arm("bits", "tot-bfs", name, 0.25, {**packed, "fetch": "always"}))
    if device == "cpu":
        arms.append(Arm("bits", "tot-bfs", "device, 8 bits", 1.0, {"kv_dtype": "int8"}))
    return arms


QUESTIONS = ("controllers", "lossless", "lossy", "bits", "gates")


def arms_of(questions: Sequence[str], device: str) -> list[Arm]:
    """The arms of these questions; `controllers` and `gates` have none of this kind."""
    tables: dict[str, Callable[[], list[Arm]]] = {
        "lossless": lossless,
        "lossy": lossy,
        "bits": lambda: bits(device),
    }
    return [arm for name, table in tables.items() if name in questions for arm in table()]
