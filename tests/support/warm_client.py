"""The client of `support.warm_process`: it starts in a hundredth of the time that torch takes.

``python -S -E warm_client.py ADDRESS ARGUMENT...`` runs a command in a fork of the warm process,
with this one's folder, environment and streams, and exits as it did.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path


def ask(address: str, arguments: list[str]) -> int:
    """Runs a command in a fork of the warm process.

    Args:
        address: the warm process's socket.
        arguments: ``-m MODULE``, ``-c CODE`` or a file, then the command's own.

    Returns:
        Its exit code; negative: the signal that ended it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(address)
        asked = {"arguments": arguments, "folder": str(Path.cwd()), "variables": dict(os.environ)}
        text = json.dumps(asked).encode()
        socket.send_fds(connection, [len(text).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(text)
        answer = connection.recv(64)
    if not answer:
        sys.exit("the warm process has ended")
    return int(answer)


if __name__ == "__main__":
    code = ask(sys.argv[1], sys.argv[2:])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
