"""Watch: gives up what all ranks compute on GPUs where one of them has ended or stands still."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from arbor.errors import ArborError
from arbor.model.parallel.channel import Closed

POLL_S = 0.2  # in which the end of a rank is noticed


class Watch:
    """Watches the other ranks while this process waits for GPUs.

    A sum on a GPU waits for its partners on the device: the process that began it is told nothing
    where one of them is gone, and waits with it. A thread gives the sum up instead.

    Args:
        processes: of the others; they may become more.
        give_up: makes every sum end, from any thread.

    Attributes:
        gave_up: it had to; nothing is computed together from then on.
    """

    def __init__(
        self, processes: Sequence[subprocess.Popen[bytes]], give_up: Callable[[], None]
    ) -> None:
        self.gave_up = False
        self._processes, self._give_up = processes, give_up
        self._until: float | None = None  # of the clock; None: nothing is waited for
        self._over = threading.Event()
        threading.Thread(target=self._run, name="arbor-ranks", daemon=True).start()

    @contextmanager
    def over(self, patience_s: float) -> Iterator[None]:
        """Within, the others are watched.

        Args:
            patience_s: most seconds that it takes.

        Raises:
            Closed: what was computed was given up.
        """
        self._until = time.monotonic() + patience_s
        try:
            yield
        except ArborError:  # says what happened
            raise
        except Exception as error:
            if self.gave_up:
                raise Closed from error
            raise
        finally:
            self._until = None
        if self.gave_up:
            raise Closed

    def end(self) -> None:
        """Watch no more."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            until = self._until
            if until is None:
                continue
            ended = any(each.poll() is not None for each in self._processes)
            if ended or time.monotonic() > until:
                self.gave_up = True
                self._give_up()
                return
