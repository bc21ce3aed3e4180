"""Digests by which what is kept in files is known to be of the same facts or the same code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BYTES = 16


def digest_of_facts(facts: Any) -> str:
    """32 hexadecimal digits, equal for facts with the same JSON; the order of keys has no part."""
    return hashlib.blake2b(
        json.dumps(facts, sort_keys=True).encode(), digest_size=BYTES
    ).hexdigest()


def digest_of_code(files: Iterable[Path]) -> str:
    """32 hexadecimal digits of the contents of files, in this order: an editable install keeps its
    version, not its code."""
    digest = hashlib.blake2b(digest_size=BYTES)
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()
