"""Decoding after a long prompt with a part of its KV, against full retention.

    python scripts/bench_compressed.py --prompt 8192 --part 0.25 --rounds 7 \
        --csv docs/experiments/compressed_speed.csv
    python scripts/bench_compressed.py --model m.gguf --prompt 1024 --part 0.5 \
        --policies streaming h2o,observed=one h2o h2o,observed=all

Every contestant reads the same prompt of a random Llama, or of `--model`, and decodes the same
number of tokens after it, greedily, on one path; lossy mode, nothing comes back, 4 sinks and the
last 32 tokens protected. A policy with `/32` behind its name acts every 32 tokens instead of at
every one, with `/heads` each KV head keeps tokens of its own, with `/adaptive` or `/pyramid`
different numbers. Prefill is not in the ratios; it is reported, since policies act while a prompt
is read too. One thread, thread CPU time, contestants in turn within each round; a ratio is full
retention's time over the contestant's, median of the rounds with its bootstrap 95 % interval.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from experiment_table import ExperimentTable, add_options
from random_llama import NoText, fixed_length, fused_runner, prefix, random_llama
from rounds import RATIO, ratio_columns

from arbor.components import build
from arbor.engine.engine import Engine
from arbor.engine.operation import Growth
from arbor.model.checkpoint import Checkpoint, ModelSettings
from arbor.model.sampling_params import Sampling
from arbor.registry import resolve
from arbor.retention.policy import Policy, Protect, Trigger
from arbor.tree import Node, ThoughtTree

POLICY_NAMES = (
    *("streaming", "lru", "h2o", "h2o/32", "snapkv", "snapkv/32", "keydiff/32"),
    *("strata/32", "h2o/heads/32", "snapkv/heads/32"),
)
SPARE = 32


def policy_of(name: str) -> Policy:
    """A policy as it is named here, also with settings, with the protection that all have."""
    base, *rest = name.split("/")
    policy: Policy = replace(
        build("policy", base),
        protect=Protect(sinks=4, recent=32),
        trigger=Trigger(spare=SPARE if str(SPARE) in rest else 0),
    )
    for heads in {"adaptive", "pyramid"} & set(rest):
        return replace(policy, granularity="head", heads=heads)  # type: ignore[arg-type]
    return replace(policy, granularity="head") if "heads" in rest else policy


class Decoder:
    """One path of an engine: a prompt, then block after block."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name = name
        if given.model:
            runner = Checkpoint(ModelSettings(model=given.model, dtype=given.dtype)).load().runner
        else:
            runner = fused_runner(random_llama(given.size, getattr(torch, given.dtype)))
        whole = name == "full"
        self.engine = Engine(
            runner,
            NoText(),
            policy=resolve("policy", "full") if whole else policy_of(name),
            mode="lossless" if whole else "lossy",
            rehydrate="selective" if whole else "off",
        )
        most = given.prompt + (given.rounds + 1) * given.tokens
        self.slots = most if whole else math.ceil(given.part * most)
        self.tree = ThoughtTree(prefix(given.prompt, runner.config.vocab_size))
        self.engine.open(self.tree, self.slots)
        self.growth = Growth(0, Sampling(temperature=0), fixed_length(given.tokens))
        began = time.thread_time()
        self.engine.extend(self.tree.root)
        self.prefill = time.thread_time() - began
        self.leaf: Node = self.tree.root

    def run(self) -> float:
        """Thread CPU seconds of one more block."""
        child = self.tree.fork(self.leaf)
        self.tree.append(child, 5)
        began = time.thread_time()
        self.engine.decode([child], self.growth)
        self.leaf = child
        return time.thread_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="100m", choices=["5m", "100m"])
    parser.add_argument("--model", help="a directory or a GGUF file; default: a random Llama")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompt", type=int, default=8192, help="tokens")
    parser.add_argument(
        "--part", type=float, default=0.25, help="of all tokens, that the device holds"
    )
    parser.add_argument("--tokens", type=int, default=32, help="decoded in each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--policies", nargs="+", default=list(POLICY_NAMES))
    add_options(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = ExperimentTable(given)
    decoders = [Decoder(name, given) for name in ("full", *given.policies)]
    seconds: dict[str, list[float]] = {each.name: [] for each in decoders}
    for at in range(given.rounds + 1):  # the first one warms up
        for each in decoders[:: 1 if at % 2 == 0 else -1]:
            spent = each.run()
            if at:
                seconds[each.name].append(spent)
    for each in decoders:
        ratios = np.divide(seconds["full"], seconds[each.name])
        memory = each.engine.memory
        row = {
            "model": Path(given.model).name if given.model else f"{given.size} Llama",
            "dtype": given.dtype,
            "prompt": given.prompt,
            "policy": each.name,
            "slots": each.slots,
            "peak_slots": memory.peak,
            "peak_mb": round(memory.peak * memory.bytes_per_token / 1e6, 1),
            "prefill_s": round(each.prefill, 2),
            "ms_per_token": round(1e3 * float(np.median(seconds[each.name])) / given.tokens, 2),
            **ratio_columns(ratios, RATIO),
            "n": given.rounds,
            "n_of": "rounds",
        }
        table.show(row)


if __name__ == "__main__":
    main()
