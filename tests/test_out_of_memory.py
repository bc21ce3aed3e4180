"""What is said where a device has no more memory: what was asked for, what holds the rest, and what
would fit."""

from __future__ import annotations

import re

import pytest
import torch

from arbor.errors import OutOfMemory
from arbor.memory import out_of_memory
from arbor.memory.out_of_memory import (
    asked_bytes,
    forward_too_large,
    is_out_of_memory,
    kv_too_large,
)
from arbor.memory.pool import KVPool, LayerKV
from arbor.model.loading import BUILTIN, load_model, locate_model

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


def test_a_shortage_of_this_machine_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)

    assert is_out_of_memory(caught.value)
    assert asked_bytes(caught.value) == 1 << 57


@pytest.mark.parametrize(
    ("amount", "asked"),
    [
        ("800 bytes", 800),
        ("1.50 KiB", 1536),
        ("512.00 MiB", 512 << 20),
        ("1.50 GiB", 3 << 29),
        ("2.00 TiB", 2 << 40),
    ],
)
def test_what_was_asked_for_is_read_from_the_error(amount: str, asked: int) -> None:
    assert asked_bytes(RuntimeError(f"Tried to allocate {amount} (GPU 0")) == asked


def test_an_error_without_a_size_names_none() -> None:
    assert asked_bytes(RuntimeError("out of memory")) is None


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


@pytest.mark.usefixtures("mib_free")
def test_a_budget_that_is_no_help_is_not_named() -> None:
    error = explained(least=99_000)

    assert "--budget" not in str(error) and "--step-tokens" in error.hint
    assert error.data["fitting_tokens"] is None


@pytest.mark.usefixtures("mib_free")
def test_a_budget_that_leaves_just_the_room_a_search_needs_is_named() -> None:
    fits = explained(least=1000).data["fitting_tokens"]

    error = explained(least=fits)

    assert f"--budget {fits}tok" in error.hint
    assert error.data["fitting_tokens"] == fits
    assert explained(least=fits + 1).data["fitting_tokens"] is None


@pytest.mark.usefixtures("mib_free")
@pytest.mark.parametrize("message", ["out of memory", "Tried to allocate 20.00 MiB. GPU 0 has"])
def test_memory_that_is_free_in_pieces_or_lacks_by_an_unknown_size_is_a_quarter_of_the_kv(
    message: str,
) -> None:
    fits = explained(1000, torch.OutOfMemoryError(message)).data["fitting_tokens"]

    assert 0.7 * 99_999 < fits < 0.75 * 99_999


def test_free_memory_is_the_first_of_the_two_numbers_of_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 9))
    assert out_of_memory.free_bytes(torch.device("cuda")) == 3


def test_where_neither_what_was_wanted_nor_what_is_free_is_known_a_quarter_of_the_kv_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(out_of_memory, "free_bytes", lambda device: 0)
    fits = explained(1000, MemoryError()).data["fitting_tokens"]

    assert 0.7 * 99_999 < fits < 0.75 * 99_999


@pytest.mark.usefixtures("mib_free")
def test_kv_that_does_not_fit_says_what_else_is_held() -> None:
    error = kv_too_large(CPU, 9999, 1 << 20, 15 << 30)

    assert error.message == (
        "cpu: the KV of 9,999 tokens takes 9.8 GiB, and 301.0 MiB are free next to weights of 15.0 GiB."
    )
    assert error.hint == "About 270 tokens fit: try --budget 270tok, or a smaller search."
    assert "next to" not in kv_too_large(CPU, 9999, 1 << 20, 0).message


def test_a_pool_that_does_not_fit_names_what_does() -> None:
    with pytest.raises(OutOfMemory) as caught:
        KVPool([LayerKV(8, 128, 128)], 10**12, torch.float32, CPU, weight_bytes=1 << 30)

    named = re.search(r"--budget (\d+)tok", str(caught.value))
    assert named is not None and "weights of 1.0 GiB" in str(caught.value)
    assert 0 < int(named[1]) * 8 * 256 * 4 <= out_of_memory.free_bytes(CPU)
    with pytest.raises(OutOfMemory) as caught:
        KVPool([LayerKV(8, 128, 128)], 10**12, torch.float32, CPU)
    assert "weights" not in str(caught.value)


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
