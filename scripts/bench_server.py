"""Throughput and latency of `arbor serve` against the number of clients, with OpenAI's client.

    python scripts/bench_server.py --rounds 3 --csv rows.csv
    python scripts/bench_server.py --kinds plain --clients 1 8 --requests 16 --tokens 32

The server runs in a process of its own; as many clients as asked for, each
a thread of this process with a connection, send one request after another, the same ones at every
level. ``plain`` continues a prompt, ``stream`` does so as a stream, ``search`` solves a problem.
Levels take turns within a round. A row of the CSV is one level of one round; the table gives
medians over rounds, and throughput as a multiple of that of the first level.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, problems_of, task_of

from arbor import components

KINDS = ("plain", "stream", "search")


@dataclass(frozen=True)
class Answered:
    """One request.

    Attributes:
        seconds: until its end.
        first_seconds: until its first text; of a stream only.
        tokens: generated.
    """

    seconds: float
    first_seconds: float | None
    tokens: int


@dataclass(frozen=True)
class Level:
    """One measurement: a kind of request at a number of clients.

    Attributes:
        seconds: from the first request to the last answer.
        cpu_seconds: of the server's process, all threads; 0 where the system does not show them.
        answered: every request.
    """

    seconds: float
    cpu_seconds: float
    answered: tuple[Answered, ...]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all clients together."""
        return sum(each.tokens for each in self.answered) / self.seconds

    @property
    def latencies(self) -> list[float]:
        """Seconds of each request, increasing."""
        return sorted(each.seconds for each in self.answered)

    @property
    def firsts(self) -> list[float]:
        """Seconds until the first text of each request, increasing; empty where not streamed."""
        found = [each.first_seconds for each in self.answered if each.first_seconds is not None]
        return sorted(found)


def part(values: list[float], share: float) -> float:
    """The smallest value that this share of the values, increasing, does not exceed; 0 of none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def cpu_seconds(process: int) -> float:
    """CPU seconds of a process and its threads so far; 0 where the system does not show them."""
    path = Path(f"/proc/{process}/stat")
    if not path.is_file():
        return 0.0
    fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(model: str, most: int) -> Iterator[tuple[str, int]]:
    """The address and the process of a server that takes so many requests at a time."""
    command = [sys.executable, "-m", "arbor", "serve", model, "--port", "0", "--json"]
    command += ["--concurrency", str(most)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield str(json.loads(process.stdout.readline())["url"]), process.pid
        finally:
            process.terminate()


def texts_of(given: argparse.Namespace, n: int) -> list[str]:
    """The first n problems as texts."""
    task = components.build("task", task_of(given))
    return [problem.text for problem in problems_of(given, task, n)]


def ask(
    client: Any, model: str, kind: str, text: str, seed: int, given: argparse.Namespace
) -> Answered:
    """Send one request about a problem and read its answer."""
    began = time.perf_counter()
    first: float | None = None
    if kind == "search":
        made = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": text}],
            seed=seed,
            extra_body={"arbor": {"task": task_of(given)}},
        )
        used = made.usage
    elif kind == "plain":
        made = client.completions.create(
            model=model, prompt=f"{text}\n", seed=seed, max_tokens=given.tokens, temperature=1
        )
        used = made.usage
    else:
        used = None
        for chunk in client.completions.create(
            model=model,
            prompt=f"{text}\n",
            seed=seed,
            max_tokens=given.tokens,
            temperature=1,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if first is None and chunk.choices and chunk.choices[0].text:
                first = time.perf_counter() - began
            used = chunk.usage or used
    return Answered(time.perf_counter() - began, first, used.completion_tokens if used else 0)


def measure(url: str, process: int, kind: str, clients: int, given: argparse.Namespace) -> Level:
    """Send all requests of a level."""
    todo: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    for seed, text in enumerate(texts_of(given, given.requests)):
        todo.put((text, seed))
    answered: list[Answered] = []
    errors: list[BaseException] = []
    start = threading.Barrier(clients + 1)

    def work() -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            model = client.models.list().data[0].id
            start.wait()
            try:
                while True:
                    text, seed = todo.get_nowait()
                    answered.append(ask(client, model, kind, text, seed, given))
            except queue.Empty:
                pass
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    start.wait()
    began, used = time.perf_counter(), cpu_seconds(process)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    seconds, used = time.perf_counter() - began, cpu_seconds(process) - used
    return Level(seconds, used, tuple(answered))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=48, help="of each level")
    parser.add_argument("--tokens", type=int, default=64, help="of a plain request at most")
    parser.add_argument("--rounds", type=int, default=3)
    add_model_and_problems(parser)
    add_options(parser)
    given = parser.parse_args()
    table = ExperimentTable(given)
    levels: dict[tuple[str, int], list[Level]] = {}
    with server(given.model, max(given.clients)) as (url, process):
        for kind in given.kinds:
            few = argparse.Namespace(**{**vars(given), "requests": 2})
            measure(url, process, kind, 1, few)
        for number in range(given.rounds):
            for kind in given.kinds:
                for clients in given.clients:
                    level = measure(url, process, kind, clients, given)
                    levels.setdefault((kind, clients), []).append(level)
                    table.add(
                        {
                            "kind": kind,
                            "clients": clients,
                            "round": number,
                            "tokens": given.tokens,
                            "seconds": round(level.seconds, 4),
                            "server_cpu_s": round(level.cpu_seconds, 2),
                            "tokens_per_s": round(level.tokens_per_s, 1),
                            "requests_per_s": round(len(level.answered) / level.seconds, 3),
                            "p50_s": round(part(level.latencies, 0.5), 4),
                            "p95_s": round(part(level.latencies, 0.95), 4),
                            "first_p50_s": round(part(level.firsts, 0.5), 4),
                            "first_p95_s": round(part(level.firsts, 0.95), 4),
                            "n": len(level.answered),
                            "n_of": "requests",
                        }
                    )
    print("kind    clients  tok/s  times the first  requests/s  p50 s  p95 s  first p50 s  CPU s")
    for (kind, clients), rounds in levels.items():
        speed = statistics.median(each.tokens_per_s for each in rounds)
        alone = statistics.median(each.tokens_per_s for each in levels[kind, given.clients[0]])
        print(
            f"{kind:7} {clients:7} {speed:6.0f} {speed / alone:17.2f}"
            f" {statistics.median(len(each.answered) / each.seconds for each in rounds):11.2f}"
            f" {statistics.median(part(each.latencies, 0.5) for each in rounds):6.3f}"
            f" {statistics.median(part(each.latencies, 0.95) for each in rounds):6.3f}"
            f" {statistics.median(part(each.firsts, 0.5) for each in rounds):12.3f}"
            f" {statistics.median(each.cpu_seconds for each in rounds):6.2f}"
        )


if __name__ == "__main__":
    main()
