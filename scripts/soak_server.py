"""Many clients of `arbor serve` for minutes: errors, latencies, KV left behind, a server killed.

    python scripts/soak_server.py --minutes 10 --clients 64 --csv rows.csv
    python scripts/soak_server.py --minutes 5 --clients 16 --kill-every 20

Each client, a thread with a connection of its own, sends one request after another: a continuation
(``plain``), one as a stream (``stream``), a short search (``short``: at most 4 expansions), a long
one (``long``: at most 32), or a stream that it leaves after some chunks (``leave``). Kinds are
drawn with the shares of ``--shares``. Then all clients stop, and the server must hold no request.
Of each kind 20 are sent again, one at a time, and must have the texts that they had among others;
with ``--budget`` other KV fits then.

With ``--kill-every S`` the server's process is killed (SIGKILL) at random moments, S seconds apart
in the mean, and started again on the same port. Requests of that moment may fail with an error of
the connection, which is counted; anything else is an error.

A row of the CSV is one kind: requests, errors, requests cut off, seconds at p50, p95 and the
largest, and the same of this kind alone with one client, measured before. Another text is an
error. The exit code is 1 after an error, or where a request is still held.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import openai
from bench_server import part, texts_of
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, task_of

SHARES = {"plain": 4, "stream": 3, "short": 2, "long": 1, "leave": 2}
EXPANSIONS = {"short": 4, "long": 32}
ALONE = 20  # requests of each kind, one at a time, before the others begin and after them
PROBLEMS = 500
START_S = 60.0  # a server has for its start


@dataclass(frozen=True)
class Sent:
    """A request that was answered: its problem, its seed, and the texts that came."""

    text: str
    seed: int
    answers: tuple[str, ...]


@dataclass
class Tally:
    """What became of the requests of one kind.

    Attributes:
        seconds: of each that was answered.
        sent: those that were answered whole.
        errors: what went wrong.
        cut: requests whose connection a killed server took along.
        busy: refusals with 429, each tried again after the time that the server names.
    """

    seconds: list[float] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    cut: int = 0
    busy: int = 0


class Server:
    """A server in a process of its own, which may be killed and comes back on the same port.

    Args:
        model: that it serves.
        budget: of KV; None: its default.
        clients: it has room for, running or waiting.
        at_once: requests in progress.
    """

    def __init__(self, model: str, budget: str | None, clients: int, at_once: int) -> None:
        self._model = model
        self._options = ["--concurrency", str(at_once), "--queue", str(clients), "--json"]
        self._options += ["--timeout", "300", *(["--budget", budget] if budget else [])]
        self._port = 0
        self.url = ""
        self.down = threading.Event()  # killed, not started again yet
        self.starts: list[float] = []  # seconds of each
        self.start()

    def start(self) -> None:
        """Start it; returns when it takes requests."""
        began = time.perf_counter()
        command = [sys.executable, "-m", "arbor", "serve", self._model, "--port", str(self._port)]
        self.process = subprocess.Popen(
            command + self._options, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.url = str(json.loads(self.process.stdout.readline())["url"])
        self._port = int(self.url.rpartition(":")[2])
        self.starts.append(time.perf_counter() - began)
        self.down.clear()

    def kill(self) -> None:
        """Kill it without a word."""
        self.down.set()
        self.process.kill()
        self.process.wait()

    def gauge(self, name: str) -> float:
        """A number of its metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=START_S) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.split()[1])
        raise SystemExit(f"{name} is not among the metrics")


@dataclass(frozen=True)
class Asked:
    """What requests are about: the served model's name, a task and its problems as texts."""

    model: str
    task: str
    texts: list[str]


def send(
    client: Any, kind: str, asked: Asked, text: str, seed: int, leave: int | None = None
) -> tuple[str, ...]:
    """The texts of one request of a kind; none of a search that its time ended.

    Args:
        leave: after so many chunks of a stream, which then has no text either.

    Raises:
        ValueError: something is not true that must be true of its answer.
    """
    if kind in EXPANSIONS:
        limits = {"task": asked.task, "max_expansions": EXPANSIONS[kind]}
        made = client.chat.completions.create(
            model=asked.model,
            messages=[{"role": "user", "content": text}],
            seed=seed,
            extra_body={"arbor": limits},
        )
        if made.usage.completion_tokens < 1:
            raise ValueError("a search without tokens")
        if any(run["limit"] == "timeout" for run in made.arbor["runs"]):
            return ()
        return tuple(choice.message.content for choice in made.choices)
    given = {"model": asked.model, "prompt": f"{text}\n", "seed": seed, "max_tokens": 64}
    if kind == "plain":
        made = client.completions.create(**given, temperature=1)
        if made.choices[0].finish_reason not in ("stop", "length"):
            raise ValueError(f"ended by {made.choices[0].finish_reason}")
        return (made.choices[0].text,)
    reason, texts = None, []
    with client.completions.create(**given, temperature=1, stream=True) as stream:
        for number, chunk in enumerate(stream):
            if chunk.choices:
                reason = chunk.choices[0].finish_reason or reason
                texts.append(chunk.choices[0].text)
            if number == leave:
                return ()
    if reason not in ("stop", "length"):
        raise ValueError(f"a stream without an end: {reason}")
    return ("".join(texts),)


def send_again(server: Server, asked: Asked, kind: str, tally: Tally, draw: random.Random) -> int:
    """Send some of the requests again, each alone; another text is an error. How many."""
    again = draw.sample(tally.sent, min(ALONE, len(tally.sent)))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for each in again:
            alone = send(client, kind, asked, each.text, each.seed)
            if alone != each.answers:
                tally.errors.append(
                    f"{kind}, seed {each.seed}, {each.text!r}: among others {each.answers!r:.80}, "
                    f"alone {alone!r:.80}"
                )
    return len(again)


def visit(
    server: Server,
    asked: Asked,
    kinds: list[str],
    tallies: dict[str, Tally],
    until: float,
    draw: random.Random,
    limit: int | None = None,
) -> None:
    """One client: requests until a time, or so many."""
    sent = 0
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        while time.perf_counter() < until and (limit is None or sent < limit):
            if server.down.is_set():
                time.sleep(0.05)
                continue
            sent += 1
            kind, text, seed = draw.choice(kinds), draw.choice(asked.texts), draw.randrange(2**31)
            leave = draw.randrange(1, 20) if kind == "leave" else None
            tally, starts, began = tallies[kind], len(server.starts), time.perf_counter()
            try:
                answers = send(client, kind, asked, text, seed, leave)
            except openai.RateLimitError as error:
                tally.busy += 1
                time.sleep(float(error.response.headers["retry-after"]))
            except Exception as error:
                broken = isinstance(error, openai.APIConnectionError)
                if broken and (server.down.is_set() or len(server.starts) > starts):
                    tally.cut += 1
                else:
                    tally.errors.append(f"{type(error).__name__}: {error}")
            else:
                tally.seconds.append(time.perf_counter() - began)
                if answers:
                    tally.sent.append(Sent(text, seed, answers))


def idle(server: Server) -> bool:
    """Whether the server holds no request, within ten seconds."""
    for _ in range(100):
        names = ("arbor_searches_running", "arbor_searches_waiting")
        if not any(server.gauge(name) for name in names):
            return True
        time.sleep(0.1)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=8, help="requests in progress at a time")
    parser.add_argument("--budget", help="KV of the server, as for arbor serve")
    parser.add_argument("--shares", nargs="+", metavar="KIND=N", help="of kinds of requests")
    parser.add_argument("--kill-every", type=float, metavar="S", help="kill the server")
    parser.add_argument("--seed", type=int, default=0)
    add_model_and_problems(parser)
    add_options(parser)
    given = parser.parse_args()
    shares = SHARES
    if given.shares:
        shares = {kind: int(number) for kind, _, number in (s.partition("=") for s in given.shares)}
        if unknown := set(shares) - set(SHARES):
            parser.error(f"unknown kind {sorted(unknown)[0]}; one of {', '.join(SHARES)}")
    kinds = [kind for kind, number in shares.items() for _ in range(number)]
    table = ExperimentTable(given)
    server = Server(given.model, given.budget, given.clients, given.at_once)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        name = client.models.list().data[0].id
    asked = Asked(name, task_of(given), texts_of(given, PROBLEMS))
    alone: dict[str, Tally] = defaultdict(Tally)
    together: dict[str, Tally] = defaultdict(Tally)
    try:
        for kind in shares:
            far = time.perf_counter() + 600
            visit(server, asked, [kind], alone, far, random.Random(given.seed), ALONE)
        kept = server.gauge("arbor_kv_slots_used")
        draws = random.Random(given.seed + 1)
        until = time.perf_counter() + 60 * given.minutes
        threads = [
            threading.Thread(
                target=visit,
                args=(server, asked, kinds, together, until, random.Random(draws.random())),
            )
            for _ in range(given.clients)
        ]
        for kind in kinds:
            together[kind]  # made before the threads
        for thread in threads:
            thread.start()
        while given.kill_every and time.perf_counter() < until:
            time.sleep(min(draws.expovariate(1 / given.kill_every), until - time.perf_counter()))
            if time.perf_counter() < until:
                server.kill()
                server.start()
        for thread in threads:
            thread.join()
        whole = idle(server)
        last = server.gauge("arbor_kv_slots_used")
        again = {each: send_again(server, asked, each, together[each], draws) for each in shares}
    finally:
        server.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(20)

    print("kind    requests  errors  cut  429  p50 s  p95 s  largest s  alone p50 s  p95 s")
    for kind in shares:
        tally, before = together[kind], sorted(alone[kind].seconds)
        seconds = sorted(tally.seconds)
        row = {
            "kind": kind,
            "clients": given.clients,
            "at_once": given.at_once,
            "minutes": given.minutes,
            "kills": len(server.starts) - 1,
            "errors": len(tally.errors),
            "sent_again": again[kind],
            "cut": tally.cut,
            "refused_429": tally.busy,
            "p50_s": round(part(seconds, 0.5), 4),
            "p95_s": round(part(seconds, 0.95), 4),
            "largest_s": round(seconds[-1], 4) if seconds else 0.0,
            "alone_p50_s": round(part(before, 0.5), 4),
            "alone_p95_s": round(part(before, 0.95), 4),
            "kv_slots_before": int(kept),
            "kv_slots_after": int(last),
            "n": len(seconds),
            "n_of": "requests",
        }
        table.add(row)
        print(
            f"{kind:7} {row['n']:8} {row['errors']:7} {row['cut']:4} {row['refused_429']:4}"
            f" {row['p50_s']:6.3f} {row['p95_s']:6.3f} {row['largest_s']:10.3f}"
            f" {row['alone_p50_s']:12.3f} {row['alone_p95_s']:6.3f}"
        )
    print(f"{int(kept):,} slots used before, {int(last):,} after; {len(server.starts) - 1} kills")
    problems = [error for kind in shares for error in together[kind].errors + alone[kind].errors]
    for problem in problems[:10]:
        print(problem)
    if not whole:
        print("a request is still held")
    sys.exit(bool(problems or not whole))


if __name__ == "__main__":
    main()
