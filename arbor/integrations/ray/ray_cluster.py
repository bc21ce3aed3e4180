"""RayCluster: workers as actors of Ray, each an engine on one GPU, or on threads of a CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import queue
import signal
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from arbor._version import __version__
from arbor.errors import ArborError, ModelError, RankLost, UsageError
from arbor.measure.cluster import (
    RUNNING,
    Broken,
    Delivered,
    Died,
    Finished,
    News,
    Ready,
    Refused,
    WorkerPlace,
)
from arbor.measure.outcomes import Job, outcomes
from arbor.trace.write import NamelessTrace, TraceWriter

if TYPE_CHECKING:
    from arbor.solver import Solver

LINGER_S = 0.05  # in which jobs that are sent together arrive
CALLS = 2  # of one actor at a time: `take` waits while `give` comes
LOCAL_STARTS = 2  # Ray gives its processes half a minute, too little on a busy machine
REGISTER_S = 300  # in which a process of a worker has to answer Ray, for the same reason
STORE_BYTES = 256 * 2**20  # of a cluster that is begun here; outcomes are small
REACH_S = 5  # in which what listens at an address takes a connection
CONNECTS = 2  # of Ray to what listens there and may be no cluster; each takes half a minute
# Ray writes nothing of its own next to the command's output
QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}


class EngineProcess:
    """One engine in a process of its own, which takes jobs and delivers outcomes.

    `load` is called first; then `give` and `take`, each from a thread of its own. A thread of this
    object searches: it takes what was given, several jobs at a time, and the budget of all is set
    when the engine is idle, by the jobs that are there then.

    Args:
        config: of the solver, see `Solver.from_config`.
        unrecorded: settings that a configuration does not hold, see `Solver.unrecorded`.
        concurrency: jobs in progress at a time.
        version: arbor's, where the jobs come from.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        unrecorded: Mapping[str, Any],
        concurrency: int,
        version: str = __version__,
    ) -> None:
        self._config, self._unrecorded = config, unrecorded
        self._concurrency = concurrency
        self._version = version
        self._given: queue.SimpleQueue[tuple[Job, bool]] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[Delivered | RankLost | str] = queue.SimpleQueue()
        self._in_progress = 0

    def load(self) -> str | ArborError:
        """Load the model; names this process, or returns the error that every process would have.

        Raises:
            Exception: a bug.
        """
        where = f"process {os.getpid()} of {socket.gethostname()}"
        if self._version != __version__:
            return ModelError(
                "worker-version",
                f"the worker in {where} has arbor {__version__}, and its jobs come from "
                f"{self._version}.",
                "Install the same version on every machine.",
            )
        from arbor.solver import Solver

        try:
            solver = Solver.from_config(self._config, **self._unrecorded)
            solver.load()
        except ArborError as error:
            error.data["worker"] = where
            return error
        threading.Thread(
            target=self._work, args=(solver,), name="arbor-engine", daemon=True
        ).start()
        return where

    def give(self, jobs: Sequence[Job], alone: bool) -> None:
        """Add jobs; `alone` where nothing else is to be in progress next to them."""
        for job in jobs:
            self._given.put((job, alone))

    def take(self) -> list[Delivered] | RankLost | str:
        """What was found since the last call, at least one outcome; waits for it.

        Returns:
            outcomes; or why nothing follows: a process that held the model with this one has ended,
            or the traceback of a bug.
        """
        delivered: list[Delivered] = []
        while not delivered or not self._found.empty():
            each = self._found.get()
            if isinstance(each, str) or (isinstance(each, RankLost) and not delivered):
                return each
            if isinstance(each, RankLost):
                self._found.put(each)  # the next call's: nothing else follows
                break
            delivered.append(each)
        return delivered

    # The thread that searches

    def _work(self, solver: Solver) -> None:
        try:
            while True:
                self._search(solver)
        except RankLost as lost:
            self._found.put(lost)
        except BaseException:
            self._found.put(traceback.format_exc())

    def _search(self, solver: Solver) -> None:
        """Search until nothing is in progress and nothing is given.

        Raises:
            RankLost: nothing more can be computed.
        """
        first = self._first()
        self._in_progress = 0
        traces: dict[int, NamelessTrace] = {}

        def jobs() -> Iterator[Job | None]:
            while True:
                job = first.popleft() if first else self._next()
                if job is None and self._in_progress == 0:
                    return
                if job is None:
                    yield None
                    continue
                self._in_progress += 1
                yield job

        def write(job: Job) -> TraceWriter:
            assert job.trace is not None, "the job asks for a trace"
            traces[job.place] = NamelessTrace(job.trace, text=job.trace_text)
            return traces[job.place]

        for outcome in outcomes(solver, jobs(), self._concurrency, write=write):
            if isinstance(outcome.result, RankLost):
                raise outcome.result
            self._in_progress -= 1
            trace = traces.pop(outcome.job.place, None)
            data = trace.take() if trace is not None and outcome.traced else None
            self._found.put(Delivered(outcome, data))

    def _first(self) -> deque[Job]:
        """The jobs of an idle engine: waits for one, and briefly for those sent with it."""
        job, alone = self._given.get()
        first = deque([job])
        with contextlib.suppress(queue.Empty):
            while len(first) < self._concurrency and not alone:
                job, alone = self._given.get(timeout=LINGER_S)
                first.append(job)
        return first

    def _next(self) -> Job | None:
        """The next job, if it is here."""
        with contextlib.suppress(queue.Empty):
            return self._given.get_nowait()[0]
        return None


class RayCluster:
    """A `Cluster` of actors of Ray.

    An actor asks for one GPU where the device is CUDA, and for as many CPUs as it has threads; one
    that begins others to hold its model with it (``tp``) for those of all, on one machine.
    Ray places them, adds machines where it may, and says which have died.

    Args:
        place: how many workers, and where.
        config, unrecorded: of each worker's solver, see `EngineProcess`; `unrecorded` holds
            ``device``, ``threads`` and ``tp``.
        concurrency: jobs in progress at a time in each.
        threads: CPUs of each process.

    Raises:
        UsageError: Ray is not installed.
    """

    def __init__(
        self,
        place: WorkerPlace,
        config: Mapping[str, Any],
        unrecorded: Mapping[str, Any],
        concurrency: int,
        threads: int,
    ) -> None:
        self.check_installed()
        self._place = place
        self._config, self._unrecorded = dict(config), dict(unrecorded)
        self._concurrency = concurrency
        self._threads = threads * int(self._unrecorded.get("tp", 1))
        self._ray: Any = None
        self._began = False  # the connection, or the cluster, is this object's
        self._on_gpu = False
        self._names = count()
        self._actors: dict[int, Any] = {}
        self._awaited: dict[Any, tuple[int, str]] = {}  # call in progress -> worker and method

    @staticmethod
    def check_installed() -> None:
        """Refuse workers where Ray is not installed.

        Raises:
            UsageError: names the package.
        """
        if importlib.util.find_spec("ray") is None:
            raise UsageError(
                "ray-missing",
                "workers need Ray, which is not installed.",
                "pip install 'arbor-search[ray]'",
            )

    def open(self) -> int:
        """Reach the cluster, once; the number of workers wanted.

        Raises:
            UsageError: it cannot be reached, or has no device for any worker.
        """
        with _quietly():
            os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", str(CONNECTS))
            import ray

            self._ray = ray
            if not ray.is_initialized():
                _print_messages(False)
                self._connect()
                self._began = True
        total = ray.cluster_resources()
        gpus, cpus = int(total.get("GPU", 0)), int(total.get("CPU", 0))
        device = self._unrecorded.get("device", "auto")
        self._on_gpu = device == "cuda" or (device == "auto" and gpus > 0)
        self._unrecorded["device"] = "cuda" if self._on_gpu else "cpu"
        if self._place.number is not None:
            return self._place.number
        return max(1, gpus if self._on_gpu else cpus // self._threads)

    def start(self) -> int:
        actor = (
            self._ray.remote(EngineProcess)
            .options(
                num_cpus=self._cpus,
                num_gpus=int(self._on_gpu),
                max_concurrency=CALLS,
                max_restarts=0,
                max_task_retries=0,
            )
            .remote(self._config, self._unrecorded, self._concurrency)
        )
        worker = next(self._names)
        self._actors[worker] = actor
        self._awaited[actor.load.remote()] = worker, "load"
        return worker

    def give(self, worker: int, jobs: Sequence[Job], alone: bool) -> None:
        self._actors[worker].give.remote(list(jobs), alone)

    def news(self, seconds: float) -> list[News]:
        if not self._awaited:
            return []
        done, _ = self._ray.wait(list(self._awaited), num_returns=1, timeout=seconds)
        return [self._heard(each) for each in done]

    def _heard(self, call: Any) -> News:
        worker, method = self._awaited.pop(call)
        try:
            answer = self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            return Broken(worker, str(error))
        except self._ray.exceptions.RayError as error:
            return Died(worker, _first_line(error))
        if isinstance(answer, RankLost):
            return Died(worker, answer.message)
        if isinstance(answer, ArborError):
            return Refused(worker, answer)
        if method == "take" and isinstance(answer, str):
            return Broken(worker, answer)
        self._awaited[self._actors[worker].take.remote()] = worker, "take"
        return Ready(worker, answer) if method == "load" else Finished(worker, answer)

    def end(self, worker: int) -> None:
        actor = self._actors.pop(worker, None)
        self._awaited = {
            call: (whose, method)
            for call, (whose, method) in self._awaited.items()
            if whose != worker
        }
        if actor is not None:
            with contextlib.suppress(Exception):  # it is dead, or the cluster is
                self._ray.kill(actor)

    def lack(self) -> str | None:
        total = self._ray.cluster_resources()
        if self._on_gpu and total.get("GPU", 0) < 1:
            return "each worker asks for a GPU, and the cluster has none"
        cpus = int(total.get("CPU", 0))
        if cpus < self._cpus:
            return f"each worker asks for {self._cpus} CPUs, and the cluster has {cpus}"
        return None

    @property
    def _cpus(self) -> int:
        """CPUs of a worker."""
        return 1 if self._on_gpu else self._threads

    def close(self) -> None:
        """End every worker, and the cluster or connection that `open` began."""
        for worker in list(self._actors):
            self.end(worker)
        if self._began:
            self._began = False
            with contextlib.suppress(Exception), _quietly():
                self._ray.shutdown()
                _print_messages(True)

    def _connect(self) -> None:
        """Begin a cluster of this machine's processes, or connect to one that runs."""
        address = self._place.address
        if address == RUNNING:
            address = os.environ.get("RAY_ADDRESS") or "auto"
        failed: Exception | None = None
        for _ in range(LOCAL_STARTS if address is None else 1):
            try:
                if address is None:
                    self._begin_here()
                else:
                    _check_listens(address, self._ray.util.get_node_ip_address)
                    self._ray.init(address, **QUIET)
                return
            except Exception as error:
                failed = error
                with contextlib.suppress(Exception):
                    self._ray.shutdown()
        _print_messages(True)
        assert failed is not None, "a connection that is not made has failed"
        raise UsageError(
            "ray-unreachable",
            f"--workers {self._place}: {_first_line(failed).rstrip('.')}.",
            "See 'ray status', or begin processes of this machine: --workers 2.",
        ) from failed

    def _begin_here(self) -> None:
        """Begin a cluster of this machine's processes, which end with this one."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is uploaded
        os.environ.setdefault("RAY_worker_register_timeout_seconds", str(REGISTER_S))
        self._ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, (self._place.number or 1) * self._threads),
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            **QUIET,
        )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """A context in which Ray leaves the process's handlers of signals as they are."""
    before = {}
    with contextlib.suppress(ValueError):  # only the main thread may handle signals
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.getsignal(number)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            for number, handler in before.items():
                signal.signal(number, handler)


def _print_messages(wanted: bool) -> None:
    """Whether Ray prints, on stdout, what its processes say of those that died."""
    with contextlib.suppress(ImportError):
        from ray._private import worker

        worker._worker_logs_enabled = wanted


def _check_listens(address: str, own_address: Callable[[], str]) -> None:
    """Refuse an address where nothing listens, for which Ray would wait ten minutes.

    Args:
        address: ``HOST:PORT``, or ``ray://HOST:PORT``; others are left to Ray.
        own_address: of this machine; Ray takes it for ``localhost``.

    Raises:
        OSError: the host is unknown, or nothing listens there; names the address.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal():
        return
    hosts = [host, own_address()] if host in ("localhost", "127.0.0.1", "::1") else [host]
    for each in hosts:
        try:
            socket.create_connection((each, int(port)), timeout=REACH_S).close()
            return
        except socket.gaierror as error:
            failed = f"the host '{host}' is unknown: {error.strerror}"
        except (OSError, OverflowError, UnicodeError) as error:
            failed = (
                f"nothing listens at {host}:{port}: {getattr(error, 'strerror', None) or error}"
            )
    raise OSError(failed)


def _first_line(error: BaseException) -> str:
    """The first line of an error's text; its type where it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
