"""Measurements of a model on this machine, kept in the cache folder."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from arbor._version import __version__
from arbor.model.runner import ModelRunner
from arbor.support.atomic_write import write_atomically
from arbor.support.digests import digest_of_facts

Place = Callable[[str], Path]


def read_measurement(place: Place, schema: str, identity: dict[str, Any]) -> str | None:
    """What was measured; None: nothing, or the file is damaged.

    Args:
        place: the file of an identity's digest.
        schema: of the file.
        identity: what the measurement depends on.
    """
    try:
        record = json.loads(place(digest_of_facts(identity)).read_bytes())
        if record["schema"] != schema or record["of"] != identity:
            return None
        return str(record["measured"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_measurement(place: Place, schema: str, identity: dict[str, Any], measured: str) -> None:
    """Writes what was measured; a failure is ignored. Arguments as for `read_measurement`."""
    path = place(digest_of_facts(identity))
    record = {"schema": schema, "of": identity, "measured": measured}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(record, indent=1) + "\n")


def identity_of(runner: ModelRunner, model: str, backend: str) -> dict[str, Any]:
    """What a timing depends on.

    Args:
        runner: the model.
        model: its name.
        backend: what computes attention.
    """
    device = runner.device
    on_gpu = device.type == "cuda"
    return {
        "model": model,
        "weight_bytes": runner.weight_bytes,
        "kv": [[each.num_kv_heads, each.head_dim_qk, each.head_dim_vo] for each in runner.layer_kv],
        "dtype": str(runner.dtype),
        "kv_dtype": str(runner.kv_dtype),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor(),
        "host": platform.node(),
        "threads": torch.get_num_threads(),
        "backend": backend,
        "torch": torch.__version__,
        "arbor": __version__,
    }
