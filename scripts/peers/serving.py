"""The loop of a process that decodes for `bench_peers.py`: a JSON object per line.

For trees, read: ``{"prompt": [...], "fans": [...], "tokens": n}``. Written: first
``{"ready": true}``, then
``{"seconds": thread CPU time, "process_seconds": that of all threads, "blocks": [[...], ...]}``.
Standard library only: it runs in the peers' environments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

Decoded = list[list[int]]


class Peer(Protocol):
    """An engine that decodes trees."""

    def prepare(self, prompt: list[int]) -> None:
        """Compute the prompt's KV, and forget what was before."""

    def decode(self, prompt: list[int], fans: list[int], tokens: int) -> Decoded:
        """Every block of a tree, level by level.

        Args:
            prompt: whose KV `prepare` computed.
            fans: children of each node, by level; child i begins with token 5 + i.
            tokens: of a block, besides its first one.
        """


def serve(peer: Peer) -> None:
    """Decode a tree for every line of standard input until it ends."""
    answer_lines(lambda asked: timed(peer, asked))


def timed(peer: Peer, asked: dict[str, Any]) -> dict[str, Any]:
    """One tree, and the seconds of its decode."""
    began, whole = time.thread_time(), time.process_time()
    peer.prepare(asked["prompt"])
    blocks: Decoded = []
    if asked["fans"]:  # else the prompt alone
        began, whole = time.thread_time(), time.process_time()
        blocks = peer.decode(asked["prompt"], asked["fans"], asked["tokens"])
    return {
        "seconds": time.thread_time() - began,
        "process_seconds": time.process_time() - whole,
        "blocks": blocks,
    }


def answer_lines(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Say that the process is ready, then answer every line of standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
