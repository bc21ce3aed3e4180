"""What may lie in the place of a model's weights: nothing, a pointer of Git LFS, a web page."""

from __future__ import annotations

POINTER = b"version https://git-lfs"


def instead_of_weights(data: bytes) -> str | None:
    """What is wrong with a file, as a clause; None: it is none of these.

    Args:
        data: its first bytes.
    """
    if not data:
        return "it is empty"
    if data.startswith(POINTER):
        return "it is a pointer of Git LFS, in whose folder `git lfs pull` fetches the file"
    if data.lstrip()[:1] == b"<":
        return "it is a web page"
    return None if any(data[:64]) else "it begins with zeros, as an unfinished download does"
