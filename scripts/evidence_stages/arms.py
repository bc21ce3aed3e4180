"""Arms: the ways in which each problem is searched, by the experiment that they belong to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arbor.papers.rksc.cgee import CGEE

# The searches of every experiment but that of controllers. Those of small models are wider
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
    "rebase": {"controller": {"name": "rebase", "width": 4}},  # ends: each path does, or is dropped
}
# How many decode together.
ROWS: Mapping[str, int] = {"chain": 1, "tot-dfs": 4, "tot-bfs": 12, "rebase": 4}

# Label -> what `arbor compare` reads, and the rows that decode together; the first is the baseline.
CONTROLLERS: Mapping[str, tuple[str, int]] = {
    "greedy": ("chain;temperature=0", 1),
    "majority-8": ("best-of-n,samples=8;aggregate=majority", 8),
    "best-of-8": ("best-of-n,samples=8;aggregate=argmax", 8),
    "beam": ("beam,beam_size=3,width=4", 12),
    "dvts": ("dvts,subtrees=3,width=4", 12),
    "rebase": ("rebase,width=4", 4),
    "mcts": ("mcts", 4),
    "dpts": ("dpts", 4),
    "tot-bfs": ("tot,beam=3,width=4", 12),
    "tot-dfs": ("tot,strategy=dfs,width=4", 4),
}

# Number -> name of each experiment, which its arms, records and tables have too.
EXPERIMENTS: Mapping[int, str] = {
    1: "paths",
    2: "lossless",
    3: "attention",
    4: "gates",
    5: "sharing",
    6: "hierarchy",
    7: "bits",
    8: "weights",
    9: "trees",
    10: "controllers",
}
TOGETHER = ("paths", "hierarchy", "bits", "trees")  # no times: several problems in progress at once

LOSSLESS_PARTS = (0.5, 0.25, 0.0)  # 0: no more than one expansion
LOSSY_PARTS = (0.75, 0.5, 0.25)
REPLAYED = ("reentry", "lru", "arborkv", "belady")
# The baselines of ArborKV's tables 1 and 4; each also with running paths as the sequence, which the
# paper applies them to: idle tokens leave first.
TREE_RANKED = ("h2o", "streaming", "thinkv-each")
BY_PATH = "spares_paths=true"
TREE_POLICIES = ("ends", "uniform", "lru", "arborkv")
PATH_POLICIES = (
    "h2o,recent=64",  # its paper protects as many recent tokens as heavy ones
    *("ends", "streaming", "h2o", "tova", "snapkv", "rkv", "keydiff", "pyramidkv"),
    *("thinkv-each", "raas", "lazyeviction-each", "ams-each", "hierarchy"),
)
DESTROYED = (0.03, 0.1, 0.5)  # parts of the thoughts' tokens
HOST = "1000000tok"  # room for every search
STAGING = 64  # tokens
REFERENCE = "reference"


@dataclass(frozen=True)
class Arm:
    """One way in which every problem is searched.

    Attributes:
        question: name of the experiment whose table has its row.
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
    budgets are parts of."""
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
    # the buffer cuts keys, so that bits differ from those without one: part 1 has it too
    arms += [Arm("lossless", "chain", "staging", part, staged) for part in (1.0, 0.5, 0.25)]
    return arms


GONE = {"mode": "lossy", "rehydrate": "off"}
BACK = {"mode": "lossy", "rehydrate": "selective"}


def paths() -> list[Arm]:
    """What lost KV costs on a path that does not fit."""
    return [
        Arm("paths", "chain", each, part, GONE, each)
        for part in LOSSY_PARTS
        for each in PATH_POLICIES
    ]


def trees() -> list[Arm]:
    """What lost KV costs in a tree whose paths fit."""
    by_path = [(f"{each}, by path", f"{each},{BY_PATH}") for each in TREE_RANKED]
    policies = [*((each, each) for each in (*TREE_POLICIES, *TREE_RANKED)), *by_path]
    arms = []
    for search, part in itertools.product(("tot-bfs", "rebase"), LOSSY_PARTS):
        arms += [Arm("trees", search, name, part, GONE, policy) for name, policy in policies]
        arms.append(Arm("trees", search, "arborkv, comes back", part, BACK, "arborkv"))
    return arms


def hierarchy() -> list[Arm]:
    """What destroying a part of the thoughts' tokens costs: of all that were ever eligible, or of
    those left at each event. With room for everything, so that tokens leave by the clock alone."""
    return [
        Arm(
            "hierarchy",
            "chain",
            f"{evict}, {ratio:g}",
            1.0,
            {**GONE, "policy": {"name": "hierarchy", "evict": evict, "ratio": ratio}},
        )
        for evict in ("cumulative", "per_event")
        for ratio in DESTROYED
    ]


def bits(device: str) -> list[Arm]:
    """What fewer bits cost, in host memory and on the device.

    Args:
        device: of the model; only a CPU reads 8-bit KV.
    """
    arms = []
    staged = {**GONE, "staging": f"{STAGING}tok"}  # read where it is, not fetched
    for search, part, how in (("chain", 0.5, staged), ("tot-bfs", 0.25, BACK)):
        for host_bits in (8, 4):
            packed = {**how, "host": HOST, "host_bits": host_bits, "fetch": "always"}
            arms.append(Arm("bits", search, f"host, {host_bits} bits", part, packed))
        if device == "cpu":
            arms.append(Arm("bits", search, "device, 8 bits", 1.0, {"kv_dtype": "int8"}))
    return arms


def gates() -> list[Arm]:
    """The time of full verification, of skipping it by the generation's confidence, and of leaving
    the model early, with the thresholds of the paper's defaults."""
    return [
        Arm("gates", "tot-bfs", "full", 1.0, {"verifier": "self"}),
        Arm("gates", "tot-bfs", "skip", 1.0, {"verifier": CGEE()}),
        Arm("gates", "tot-bfs", "layer exit", 1.0, {"verifier": CGEE(levels="exit")}),
    ]


def arms_of(experiments: Sequence[str], device: str) -> list[Arm]:
    """The arms of these experiments; those that record something else than searches have none."""
    tables: dict[str, Callable[[], list[Arm]]] = {
        "paths": paths,
        "lossless": lossless,
        "gates": gates,
        "hierarchy": hierarchy,
        "bits": lambda: bits(device),
        "trees": trees,
    }
    return [arm for name, table in tables.items() if name in experiments for arm in table()]
