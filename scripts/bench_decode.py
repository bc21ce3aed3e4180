"""Tree decode against Hugging Face (batched copies of the cache, or one deep copy per branch), and
against arbor without its native kernels.

    python scripts/bench_decode.py --size 100m --dtype float32 --shapes F8 F32 T4 --rounds 5 --json
    out.json

Every contestant decodes the same tree on the same random weights: child i of a fork starts with
token 5 + i, then greedily; token counts are fixed; the prefill of the prefix is not timed. One
thread, thread CPU time, contestants in turn within each round; reported are the median of the
per-round ratios and its bootstrap 95 % interval. KV bytes are what each contestant holds at its
peak, computed from its own tensors.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment_table import commit
from random_llama import NoText, fixed_length, fused_runner, prefix, random_llama
from rounds import ratio_columns
from transformers import DynamicCache

from arbor.engine.engine import Engine
from arbor.engine.operation import Growth
from arbor.kernels.attention.base import AttentionBackend
from arbor.kernels.native import native_state, without_native
from arbor.measure.timing import turned
from arbor.model.sampling_params import Sampling
from arbor.retention.policy import POLICIES
from arbor.tree import Node, ThoughtTree

PREFIX = 512
# fan-out per level, tokens per block
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "F1": ((1,), 128),
    "F8": ((8,), 128),
    "F32": ((32,), 128),
    "F32x48": ((32,), 48),
    "T4": ((2, 2, 2, 4), 32),
}
PREFILL = ((), 0)  # the prefix alone, a shape of `bench_peers.py`


def generated(shape: str) -> int:
    """Tokens a shape decodes."""
    fans, tokens = SHAPES[shape]
    return int(sum(np.cumprod(fans))) * tokens


class Arbor:
    """The engine, on a tree with a filled root of `prompt` tokens."""

    def __init__(
        self,
        model: Any,
        shape: str,
        vocabulary: int,
        backend: AttentionBackend | None = None,
        *,
        prompt: int = PREFIX,
    ) -> None:
        self.fans, self.tokens = SHAPES[shape]
        self.engine = Engine(fused_runner(model, backend), NoText(), policy=POLICIES["lru"])
        self.slots = prompt + generated(shape)
        self.prompt = prefix(prompt, vocabulary)
        self.growth = Growth(0, Sampling(temperature=0), fixed_length(self.tokens))

    def prepare(self) -> None:
        self.tree = ThoughtTree(self.prompt)
        self.engine.finish()  # the tree before
        self.engine.open(self.tree, self.slots)
        self.engine.extend(self.tree.root)

    def run(self) -> None:
        level = [self.tree.root]
        for fan in self.fans:
            children: list[Node] = []
            for leaf in level:
                for index in range(fan):
                    child = self.tree.fork(leaf)
                    self.tree.append(child, 5 + index)
                    children.append(child)
            self.engine.decode(children, self.growth)
            level = children

    def kv_bytes(self) -> int:
        return self.engine.memory.peak * self.engine.memory.bytes_per_token


class Batched:
    """`generate` over a batch whose caches were copied, as transformers users write it."""

    def __init__(self, model: Any, shape: str, vocabulary: int, *, prompt: int = PREFIX) -> None:
        self.model = model
        self.fans, self.tokens = SHAPES[shape]
        self.prompt = torch.tensor([prefix(prompt, vocabulary)])
        self.peak = 0

    def prepare(self) -> None:
        self.cache = DynamicCache()
        with torch.inference_mode():
            self.model(self.prompt, past_key_values=self.cache, logits_to_keep=1)

    def run(self) -> None:
        ids, cache = self.prompt, self.cache
        for fan in self.fans:
            ids, cache = self._level(ids, cache, fan, cache.get_seq_length())
        self.cache = cache

    def _level(self, ids: Any, cache: Any, fan: int, length: int) -> tuple[Any, Any]:
        cache.batch_repeat_interleave(fan)
        first = torch.arange(5, 5 + fan, device=ids.device).repeat(ids.shape[0]).unsqueeze(1)
        ids = torch.cat([ids.repeat_interleave(fan, dim=0), first], dim=1)
        # the first token is given; the last one is run too, as a block's last token is
        out = self.model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=self.tokens,
            min_new_tokens=self.tokens,
            do_sample=False,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        self.peak = max(self.peak, _cache_bytes(out.past_key_values))
        kept = out.sequences[:, :-1]
        return kept, out.past_key_values

    def kv_bytes(self) -> int:
        return self.peak


class DeepCopied(Batched):
    """One deep copy of the cache per branch, decoded one by one: the usual tree-of-thoughts
    code."""

    def run(self) -> None:
        level = [(self.prompt, self.cache)]
        for fan in self.fans:
            following = []
            for ids, cache in level:
                for index in range(fan):
                    mine = copy.deepcopy(cache)
                    row = torch.cat([ids, torch.tensor([[5 + index]])], dim=1)
                    out = self.model.generate(
                        row,
                        past_key_values=mine,
                        max_new_tokens=self.tokens,
                        min_new_tokens=self.tokens,
                        do_sample=False,
                        return_dict_in_generate=True,
                        pad_token_id=0,
                    )
                    following.append((out.sequences[:, :-1], out.past_key_values))
            level = following
            self.peak = max(self.peak, sum(_cache_bytes(cache) for _, cache in level))


def _cache_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def timed(contestant: Any) -> float:
    """Thread CPU seconds of one decode, without the prefix unless that is all."""
    began = time.thread_time()
    contestant.prepare()
    if not contestant.fans:  # the prefix alone
        return time.thread_time() - began
    began = time.thread_time()
    contestant.run()
    return time.thread_time() - began


def rounds_of(contestants: Mapping[str, Any], rounds: int) -> dict[str, np.ndarray[Any, Any]]:
    """Thread CPU seconds of each contestant, in turn within each round after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for at in range(rounds + 1):
        for name in turned(list(contestants), at):
            times[name].append(timed(contestants[name]))
    return {name: np.array(each[1:]) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="100m", choices=["5m", "100m"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", default=["F8", "F32", "T4"], choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deepcopy", action="store_true", help="also one deep copy per branch")
    parser.add_argument("--torch", action="store_true", help="also arbor without native kernels")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    rows = []
    for shape in args.shapes:
        ours, theirs = random_llama(args.size, dtype), random_llama(args.size, dtype)
        vocabulary = theirs.config.vocab_size
        contestants: dict[str, Any] = {
            "arbor": Arbor(ours, shape, vocabulary),
            "batched": Batched(theirs, shape, vocabulary),
        }
        if args.torch:
            with without_native():
                contestants["torch"] = Arbor(random_llama(args.size, dtype), shape, vocabulary)
        if args.deepcopy:
            contestants["deepcopied"] = DeepCopied(theirs, shape, vocabulary)
        times = rounds_of(contestants, args.rounds)
        for name in list(contestants)[1:]:
            row = {
                "size": args.size,
                "dtype": args.dtype,
                "shape": shape,
                "against": name,
                "n": args.rounds,
                **ratio_columns(times[name] / times["arbor"], ("ratio", "low", "high"), 2),
                "arbor_tok_per_s": round(generated(shape) / float(np.median(times["arbor"])), 1),
                "their_tok_per_s": round(generated(shape) / float(np.median(times[name])), 1),
                "arbor_kv_bytes": contestants["arbor"].kv_bytes(),
                "their_kv_bytes": contestants[name].kv_bytes(),
            }
            row["kv_ratio"] = round(row["their_kv_bytes"] / row["arbor_kv_bytes"], 2)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if args.json:
        about = {"commit": commit(), "native": native_state(), "torch": torch.__version__}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
