"""A test process that has imported the large packages already and forks for every run.

`scripts/mutate.py` starts one per copied tree: importing torch and transformers takes most of the
time of a test that fails at once. Reads one JSON object a line from standard input:
`{"tree": folder, "arguments": pytest's, "environment": {...}, "limit_s": seconds}`; answers with
`{"code": exit code, negative for a signal, or null at the limit, "output": text}`. `arbor` itself
is imported by the forked process only, from the tree that is asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import scipy.stats  # noqa: F401
import tokenizers  # noqa: F401
import torch  # noqa: F401
import transformers.modeling_utils
from transformers import LlamaForCausalLM  # noqa: F401

POLL_S = 0.02


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run pytest in a forked process, and end it with all it started once its time is up."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            _run(request, output.fileno())
        ends = time.monotonic() + request["limit_s"]
        done, status = os.waitpid(child, os.WNOHANG)
        while not done and time.monotonic() < ends:
            time.sleep(POLL_S)
            done, status = os.waitpid(child, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(status) if done else None
        if not done:
            os.waitpid(child, 0)
        output.seek(0)
        return {"code": code, "output": output.read()}


def _run(request: dict[str, Any], output: int) -> None:
    code = 3  # pytest's own for an internal error
    try:
        os.setpgid(0, 0)
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(request["tree"])
        os.environ.update(request["environment"])
        sys.path.insert(0, request["tree"])
        assert "arbor" not in sys.modules
        code = int(pytest.main(request["arguments"]))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    assert transformers.modeling_utils  # imported for its side effects
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
