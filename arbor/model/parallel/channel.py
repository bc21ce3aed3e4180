"""Channel: messages between the first of several ranks and another one."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")


class Closed(Exception):
    """The other process has ended, or does not listen."""


class Channel:
    """One end of a pair of sockets; messages are Python's own objects, of this program alone.

    Args:
        end: of the pair.

    Attributes:
        sent_bytes: by this end.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.sent_bytes = 0

    def send(self, message: Any, patience_s: float | None = None) -> None:
        """Send a message.

        Args:
            message: that `pickle` takes.
            patience_s: most seconds until the other one has taken what does not fit the buffers;
                None: no limit.

        Raises:
            Closed: the other process does not take it.
        """
        data = pickle.dumps(message, protocol=5)
        self._end.settimeout(patience_s)
        self.sent_bytes += _LENGTH.size + len(data)
        try:
            self._end.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise Closed from error

    def receive(self, patience_s: float | None = None) -> Any:
        """The next message.

        Args:
            patience_s: most seconds until it comes; None: no limit.

        Raises:
            Closed: the other process has ended.
            TimeoutError: none has come.
        """
        self._end.settimeout(patience_s)
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        self._end.settimeout(None)
        return pickle.loads(self._exactly(length))

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _exactly(self, size: int) -> bytearray:
        found = bytearray(size)
        view, done = memoryview(found), 0
        while done < size:
            try:
                count = self._end.recv_into(view[done:])
            except TimeoutError:
                raise
            except OSError as error:
                raise Closed from error
            if not count:
                raise Closed
            done += count
        return found
