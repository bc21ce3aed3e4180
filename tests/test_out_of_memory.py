"""What is said where a device has no more memory: what was asked for, what holds the rest, and what
would fit."""

from __future__ import annotations

import pytest
import torch

from arbor.errors import OutOfMemory
from arbor.memory import out_of_memory
from arbor.memory.out_of_memory import forward_too_large
from arbor.model.loading import BUILTIN, load_model, locate_model
from arbor.support.shortage import is_out_of_memory

CPU = torch.device("cpu")
CUDA_ERROR = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 23.53 GiB"
)


@pytest.fixture
def mib_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "free_bytes", lambda device: 301 << 20)


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (CUDA_ERROR, True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ..."), True),
        (RuntimeError("Storage size calculation overflowed with sizes=[9, 9]"), True),
        (MemoryError(), True),
        (RuntimeError("value cannot be converted to type int without overflow"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_a_shortage_is_known_by_its_error(error: Exception, short: bool) -> None:
    assert is_out_of_memory(error) is short


def explained(least: int, error: Exception = CUDA_ERROR) -> OutOfMemory:
    return forward_too_large(
        error,
        CPU,
        "decode of 12 tokens",
        weights=15 << 30,
        slots=99_999,
        bytes_per_token=64 << 10,
        least=least,
    )


@pytest.mark.usefixtures("mib_free")
def test_a_forward_that_does_not_fit_says_what_holds_the_memory_and_what_would_leave_room() -> None:
    error = explained(least=1000)

    assert str(error).startswith(
        "[oom] cpu: wanted 512.0 MiB with 301.0 MiB free, in decode of 12 tokens "
        "(weights 15.0 GiB, KV 6.1 GiB). Try --budget "
    )
    fits = error.data["fitting_tokens"]
    assert f"--budget {fits}tok" in error.hint
    # 211 MiB are missing, and a tenth of them is spare: 3,713 tokens and a part of one go
    assert fits == 99_999 - 3_714
    assert error.data["held_bytes"] == {"weights": 15 << 30, "KV": 100_000 * (64 << 10)}
    assert error.exit_code == 6


def test_weights_that_do_not_fit_are_no_broken_model(monkeypatch: pytest.MonkeyPatch) -> None:
    source = locate_model("builtin:sapling")
    stored = (BUILTIN["sapling"] / "model.safetensors").stat().st_size

    def fail(*args: object, **kwargs: object) -> None:
        raise CUDA_ERROR

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.Module, "to", fail)
        patched.setattr("transformers.utils.import_utils.is_accelerate_available", lambda: False)
        with pytest.raises(OutOfMemory, match="meta: the weights take ") as caught:
            load_model(source, torch.float32, torch.device("meta"))
    assert stored / 2 < caught.value.data["weights_bytes"] < stored * 4
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(OutOfMemory, match=r"the weights do not fit, and .* are free\. Try --dtype"):
        load_model(source, torch.float32, CPU)
