"""A rank after the first: computes what it is told, until the first one ends.

Run as a program by `Followers`, with the number of an open socket.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from arbor.errors import ArborError
from arbor.model.parallel.channel import Channel, Closed

if TYPE_CHECKING:
    from arbor.memory.pool import KVPool
    from arbor.model.parallel.orders import PoolPlace
    from arbor.model.runner import ModelRunner

POLL_S = 1.0  # in which the end of the first rank is noticed


def main(descriptor: int) -> None:
    """Load this rank's part of the model, and follow."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        _Following(channel).run()
    except Closed:  # the first one has ended
        os._exit(0)
    except BaseException as error:
        _report(channel, error)
        os._exit(1)


def _end_with(first: int) -> None:
    """End when the first rank has ended, whatever this one waits for."""
    while os.getppid() == first:
        time.sleep(POLL_S)
    os._exit(0)


class _Following:
    """Loads the model and carries out orders.

    Args:
        channel: to the first rank.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pools: dict[int, KVPool] = {}

    def run(self) -> None:
        """Until the first one ends."""
        model, number, count, threads, meeting = self._channel.receive()
        import torch

        from arbor.model.checkpoint import Checkpoint, ModelSettings
        from arbor.model.parallel.ranks import Ranks

        torch.set_num_threads(threads)
        self._channel.send("here")
        device = torch.device(model["device"])
        ranks = Ranks(number, count, meeting, lambda: self._channel.send("loaded"), device)
        if device.type == "cuda":
            ranks.meet()
        runner = Checkpoint(ModelSettings(**model), follows=ranks).load().runner
        self._channel.send("ready")
        ranks.hurry()
        while True:
            self._carry_out(runner, self._channel.receive())

    def _carry_out(self, runner: ModelRunner, order: Any) -> None:
        from arbor.model.parallel.orders import ForwardOrder

        pool = self._pool(runner, order.pool)
        if isinstance(order, ForwardOrder):
            runner.follow(order, pool)
        else:
            runner.read_together(pool, order.layer, order.slots, values=order.values)

    def _pool(self, runner: ModelRunner, place: PoolPlace) -> KVPool:
        """This rank's pool of a number, with as many slots as the first one's."""
        import torch

        from arbor.memory.pool import KVPool

        for number in place.gone:
            self._pools.pop(number, None)
        pool = self._pools.get(place.number)
        if pool is None:
            dtype: torch.dtype = getattr(torch, place.dtype)
            pool = KVPool(runner.layer_kv, place.slots, dtype, runner.device)
            self._pools[place.number] = pool
        if pool.slots < place.slots:
            pool.grow(place.slots)
        return pool


def _report(channel: Channel, error: BaseException) -> None:
    """Say why this rank ends, before the first one finds that it has."""
    message: Any = error
    if not isinstance(error, ArborError):
        message = f"{type(error).__name__}: {error}"
        logging.getLogger("arbor").debug("%s", traceback.format_exc())
    try:
        channel.send(message, 1.0)
    except Exception:
        return


if __name__ == "__main__":
    main(int(sys.argv[1]))
