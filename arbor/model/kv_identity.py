"""kv_identity: digest of everything besides the tokens that the bits of K and V depend on."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from arbor.kernels.native import native_state
from arbor.memory.prompt_files import FORMAT
from arbor.model.loading import ModelLocation
from arbor.model.measurement_file import identity_of
from arbor.model.model_identity import model_identity
from arbor.model.runner import ModelRunner
from arbor.support.digests import digest_of_code, digest_of_facts

CODE = ("kernels", "model")  # folders whose modules compute K and V
SOURCES = (".py", ".h", ".cpp")


def kv_identity(
    runner: ModelRunner,
    source: ModelLocation,
    backend: str,
    *,
    deterministic: bool,
    updated: str | None = None,
) -> str | None:
    """A digest that is equal only where equal tokens have the same K and V.

    It names the weights (a directory's files, or the commit of a model of the Hub, and those given
    since), the dtype, what each layer stores, the backend, the kind of device, the instructions
    that torch and the native kernels use, the versions of torch and arbor, arbor's own code, and
    the format of the files. Another number of threads or another machine changes the last bits
    only, so they are named if `deterministic`.

    Args:
        runner: the model.
        source: the place it was loaded from.
        backend: what computes attention.
        deterministic: as in `Solver`.
        updated: a digest of weights that replaced those of the source.

    Returns:
        32 hexadecimal digits; None where nothing identifies the weights.
    """
    weights = model_identity(source)
    if weights is None:
        return None
    facts = identity_of(runner, weights, backend) | {"updated": updated}
    if not deterministic:
        del facts["host"], facts["threads"]
    facts |= {
        "format": FORMAT,
        "deterministic": deterministic,
        "instructions": [torch.backends.cpu.get_cpu_capability(), native_state()],
        "code": computing_code(),
    }
    return digest_of_facts(facts)


@functools.cache
def computing_code() -> str:
    """A digest of the code that computes K and V."""
    package = Path(__file__).parents[1]
    files = [path for folder in CODE for path in sorted((package / folder).rglob("*"))]
    return digest_of_code(path for path in files if path.suffix in SOURCES)
