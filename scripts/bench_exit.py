"""CPU time of a verification pass whose questions leave after a layer, against the full pass.

    python scripts/bench_exit.py --size 100m --rounds 7 --json out.json

One thread, thread CPU time, contestants interleaved, one tree whose paths are all resident: a
prompt, several leaves, one question each. Every question leaves after the same layer, whatever its
state (weights are random), but is looked at as a rule would: after each layer from the second on,
or after every fourth. `never` looks and lets nobody leave: what looking costs. The ratio is
full / exit: the median of per-round ratios with its 95 % interval (bootstrap).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from random_llama import SIZES, NoText, fixed_length, prefix, random_llama
from rounds import RATIO, in_turn, ratio_columns

from arbor.engine.engine import Engine
from arbor.engine.operation import Growth
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.linear.layers import pack_linears
from arbor.model.runner import ModelRunner
from arbor.model.sampling_params import Sampling
from arbor.papers.rksc.exit_thresholds import LayerExit, Measure
from arbor.papers.rksc.exit_watch import ways_of
from arbor.retention.policy import POLICIES
from arbor.tree import ThoughtTree

FULL = "full"
LEAF_TOKENS = 16
VERDICTS = (5, 6)  # token ids


@dataclass(frozen=True)
class FixedExit(LayerExit):
    """Leaves after a fixed layer; looks as often as a rule would."""

    leaves_after: int = 0

    def checks(self, layers: int) -> bool:
        """Whether a state is looked at: every so many layers, and where it leaves."""
        return layers % self.every == 0 or layers == self.leaves_after

    def is_over(self, layers: int, values: Sequence[float]) -> bool:
        """Whether the layer is reached."""
        return layers == self.leaves_after


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each rule."""
    layers = SIZES[args.size]["num_hidden_layers"]
    model = random_llama(args.size, getattr(torch, args.dtype))
    engine = Engine(ModelRunner(model, TorchCascade()), NoText(), policy=POLICIES["lru"])
    pack_linears(model)
    vocabulary = model.config.vocab_size
    tree = ThoughtTree(prefix(args.prompt, vocabulary))
    engine.open(tree, args.prompt + args.leaves * (LEAF_TOKENS + args.question))
    engine.extend(tree.root)
    growth = Growth(0, Sampling(temperature=1.0, top_p=1.0), fixed_length(LEAF_TOKENS))
    nodes = engine.grow([(tree.root, args.leaves)], growth)
    questions = [prefix(args.question, vocabulary)] * args.leaves
    verdicts = [VERDICTS] * args.leaves
    rules: dict[str, FixedExit] = {}
    for measured, every in (("entropy", 1), ("entropy", 4), ("margin", 1)):
        for after in (0, *(layers * part // 3 for part in (1, 2))):
            name = f"{measured}, every {every}, after {after or 'never'}"
            rules[name] = FixedExit(
                1, every=every, measure=cast(Measure, measured), leaves_after=after
            )
    contestants: dict[str, Callable[[], object]] = {FULL: partial(engine.ask, nodes, questions)}
    for name, rule in rules.items():
        ways = ways_of(rule, len(nodes), verdicts)
        contestants[name] = partial(engine.ask, nodes, questions, ways)
    seconds = in_turn(contestants, args.rounds, warm=2)
    return [
        {
            "measure": rule.measure,
            "every": rule.every,
            "exit_layer": rule.leaves_after or layers,
            "layers": layers,
            "full_ms": round(1e3 * float(np.median(seconds[FULL])), 2),
            "exit_ms": round(1e3 * float(np.median(seconds[name])), 2),
            **ratio_columns(seconds[FULL] / seconds[name], RATIO),
            "n": args.rounds,
        }
        for name, rule in rules.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="100m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--leaves", type=int, default=8)
    parser.add_argument("--question", type=int, default=16, help="tokens of each question")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(args)
    for row in rows:
        print(json.dumps(row), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"settings": vars(args) | {"json": None}, "rows": rows}))


if __name__ == "__main__":
    main()
