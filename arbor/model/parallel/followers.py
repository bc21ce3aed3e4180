"""Followers: the other processes that hold the model with this one, begun and ended by it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed
from torch.distributed.distributed_c10d import _abort_process_group

from arbor.errors import ArborError, OutOfMemory, RankLost, UsageError
from arbor.memory.pool import KVPool
from arbor.model.parallel.channel import Channel, Closed
from arbor.model.parallel.orders import PoolPlace
from arbor.model.parallel.ranks import LOADING, PATIENCE, Ranks, meeting_of_gpus
from arbor.model.parallel.watch import Watch

POLL_S = 0.2  # in which a signal is noticed while the others load
DYING_S = 5.0  # until a process that has closed its socket has ended
MEETING_S = 120.0  # until GPUs have found each other
STAGES = ("here", "loaded", "ready")  # that the others come to


class Followers:
    """The ranks after the first, each in a process of its own on this machine.

    They compute what they are told (`together`) and decide nothing: the search, its files and its
    listeners are this process's alone. They end with it, however it ends.

    Args:
        model: settings of the model, as keyword arguments of `ModelSettings`.
        devices: of each rank, this one the first: GPUs, or a CPU for all.
        threads: of torch, in each process.

    Attributes:
        ranks: all of them, seen from this process.
        processes: of the others.

    Raises:
        UsageError: this process is part of another group already.
        RankLost: one could not begin.
    """

    def __init__(self, model: Mapping[str, Any], devices: Sequence[str], threads: int) -> None:
        count = len(devices)
        if torch.distributed.is_initialized():
            raise UsageError(
                "tp",
                f"--tp {count}: this process is in a group of torch.distributed already.",
                "Close the other solver, or search in a process of its own.",
                tp=count,
            )
        self._count = count
        self._folder = tempfile.mkdtemp(prefix="arbor-ranks-")
        self.processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._watches: list[Watch] = []  # one, of GPUs
        self.close = weakref.finalize(
            self, _end, self.processes, self._channels, self._watches, self._folder, os.getpid()
        )
        self._pools: weakref.WeakKeyDictionary[KVPool, int] = weakref.WeakKeyDictionary()
        self._gone: list[int] = []
        self._begun = 0  # pools
        self._lost: RankLost | None = None
        own_device = torch.device(devices[0])
        meeting = str(Path(self._folder) / "meeting")
        if own_device.type == "cuda":
            self._meeting = meeting_of_gpus(count)
            meeting = str(self._meeting.port)
        try:
            for number, device in enumerate(devices[1:], 1):
                own = dict(model) | {"device": device}
                self._begin(threads).send((own, number, count, threads, meeting))
            self.wait("here")
            self.ranks = Ranks(0, count, meeting, lambda: self.wait("loaded"), own_device)
            if own_device.type == "cuda":
                self._watches.append(Watch(self.processes, self.ranks.give_up))
                self._meet()
        except BaseException:
            self.close()
            raise

    def _begin(self, threads: int) -> Channel:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        more = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "arbor.model.parallel.follower", str(theirs.fileno())]
        process = subprocess.Popen(
            command,
            env=os.environ | more,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the first one
        )
        theirs.close()
        self.processes.append(process)
        self._channels.append(Channel(ours))
        return self._channels[-1]

    def _meet(self) -> None:
        """Let the GPUs find each other, which nothing can give up, so that a thread waits for it.

        Raises:
            RankLost: they do not.
        """
        failed: list[BaseException] = []

        def meet() -> None:
            try:
                self.ranks.meet()
            except BaseException as error:
                failed.append(error)

        meeting = threading.Thread(target=meet, name="arbor-meeting", daemon=True)
        meeting.start()
        patience = MEETING_S
        while meeting.is_alive() and patience > 0:
            meeting.join(POLL_S)
            patience -= POLL_S
            for number, process in enumerate(self.processes, 1):
                if process.poll() is not None and meeting.is_alive():
                    raise self._fail(self._end_of(number))
        if meeting.is_alive():
            what = f"one has not found the others in {MEETING_S:.0f} seconds"
            raise self._fail(_lost(self._count, what))
        if failed:
            raise self._fail(_lost(self._count, f"the first met no other: {failed[0]}"))

    def _end_of(self, number: int) -> ArborError:
        """Why a process has ended."""
        try:
            return self._reported(number, self._channels[number - 1].receive(POLL_S))
        except (Closed, TimeoutError):
            return self._of_dead(number)

    @contextmanager
    def watched(self, patience_s: float = LOADING.total_seconds()) -> Iterator[None]:
        """Within, what this process computes with the others ends where one of them does.

        Args:
            patience_s: most seconds that it takes.

        Raises:
            Closed: one has ended, or did not answer.
        """
        if not self._watches:
            yield
            return
        with self._watches[0].over(patience_s):
            yield
            self.ranks.finish()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within, this process loads its part of the model; all have, where it ends.

        Raises:
            RankLost: another one has ended.
            ArborError: another one cannot go on, and says why.
        """
        try:
            with self.watched():
                yield
        except (Closed, RuntimeError) as error:
            known = self._cause(error)
            if known is None:
                raise
            raise self._fail(known) from error
        self.wait_until_ready()

    def wait(self, stage: str) -> None:
        """Wait until all others have come to a stage.

        Raises:
            RankLost: one has ended.
            ArborError: one cannot go on, and says why.
        """
        for number, channel in enumerate(self._channels, 1):
            while True:
                try:
                    message = channel.receive(POLL_S)
                except TimeoutError:
                    continue
                except Closed:
                    raise self._fail(self._of_dead(number)) from None
                if message == stage:
                    break
                raise self._fail(self._reported(number, message))

    def wait_until_ready(self) -> None:
        """Wait until all others have loaded the model; from now on they answer soon.

        Raises:
            RankLost, ArborError: as of `wait`.
        """
        self.wait("ready")
        shutil.rmtree(self._folder, ignore_errors=True)  # all have met: a kill leaves no file
        self.ranks.hurry()

    @property
    def ordered_bytes(self) -> int:
        """Bytes that the others were sent, of orders."""
        return sum(each.sent_bytes for each in self._channels)

    def place(self, pool: KVPool) -> PoolPlace:
        """A pool of this process, as the others find theirs."""
        if pool not in self._pools:
            self._begun += 1
            self._pools[pool] = self._begun
            weakref.finalize(pool, self._gone.append, self._begun).atexit = False
        gone = tuple(self._gone)
        del self._gone[: len(gone)]
        dtype = str(pool.dtype).removeprefix("torch.")
        return PoolPlace(self._pools[pool], pool.slots, dtype, gone)

    @contextmanager
    def together(self, order: Any) -> Iterator[None]:
        """Within, this process computes what the others are told to compute.

        Where it fails, the ranks are no longer at the same place, and the others are ended.

        Raises:
            RankLost: another rank has died, or does not answer.
            OutOfMemory: another rank has no memory for it.
        """
        if not self.close.alive:
            raise self._lost or _lost(self._count, "all but the first ended with their solver")
        try:
            for channel in self._channels:
                channel.send(order, PATIENCE.total_seconds())
            with self.watched(PATIENCE.total_seconds()):
                yield
        except BaseException as error:
            known = self._cause(error)
            self._fail(known)
            if known is None:
                raise
            raise known from error

    def _cause(self, error: BaseException) -> ArborError | None:
        """Why another rank has ended; None: this one has failed by itself."""
        if isinstance(error, ArborError) or not isinstance(error, Closed | RuntimeError):
            return None
        for number, channel in enumerate(self._channels, 1):
            try:
                while (message := channel.receive(POLL_S)) in STAGES:
                    pass
                return self._reported(number, message)
            except TimeoutError:
                continue
            except Closed:
                return self._of_dead(number)
        if isinstance(error, RuntimeError) and not _is_of_group(error):
            return None
        silent = PATIENCE.seconds
        return _lost(self._count, f"one of them has not answered for {silent} seconds")

    def _reported(self, number: int, message: Any) -> ArborError:
        """The error that another rank has named."""
        if isinstance(message, ArborError) and not isinstance(message, OutOfMemory):
            return message
        what = message.message if isinstance(message, ArborError) else str(message)
        if isinstance(message, OutOfMemory):
            return OutOfMemory(message.code, f"process {number} of {self._count}: {what}")
        return _lost(self._count, f"number {number} has ended: {what.rstrip('.')}")

    def _of_dead(self, number: int) -> RankLost:
        process = self.processes[number - 1]
        try:
            code = process.wait(DYING_S)
        except subprocess.TimeoutExpired:
            return _lost(self._count, f"number {number} does not listen")
        how = f"with exit code {code}"
        if code < 0:
            how = f"by signal {signal.Signals(-code).name}"
        return _lost(self._count, f"number {number} (process {process.pid}) was ended {how}")

    def _fail(self, error: ArborError | None) -> ArborError:
        """End the others; nothing is computed together from now on."""
        found = error or _lost(self._count, "the first was cut off in a forward")
        self._lost = found if isinstance(found, RankLost) else _lost(self._count, found.message)
        self.close()
        return found


def _lost(count: int, what: str) -> RankLost:
    return RankLost(
        "rank-lost",
        f"of the {count} processes that hold the model together, {what}.",
        "Start the command again; what was finished is kept.",
    )


def _is_of_group(error: BaseException) -> bool:
    """Whether an error is of a sum over the ranks."""
    return isinstance(error, torch.distributed.DistError) or any(
        word in str(error).lower() for word in ("gloo", "nccl", "connection", "timed out")
    )


def _end(
    processes: Sequence[subprocess.Popen[bytes]],
    channels: Sequence[Channel],
    watches: Sequence[Watch],
    folder: str,
    owner: int,
) -> None:
    """End the processes at once: they hold nothing that is to be kept."""
    if os.getpid() != owner:
        return  # a fork of it
    for watch in watches:
        watch.end()
    for channel in channels:
        channel.close()
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
    if not torch.distributed.is_initialized():
        return
    if not watches:
        _leave(torch.distributed.destroy_process_group)
        return
    leaving = threading.Thread(target=_leave, args=(_abort_process_group,), daemon=True)
    try:
        leaving.start()  # a GPU may wait for those that have ended
    except RuntimeError:  # Python ends, and begins no thread any more
        _leave(_abort_process_group)
    else:
        leaving.join(DYING_S)


def _leave(leave: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError, ValueError):
        leave()
