"""Tensor parallelism on GPUs, as far as stand-ins show it: devices, NCCL's settings, the watch."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gguf_files import write_random
from torch import nn

from arbor import Solver
from arbor.errors import UsageError
from arbor.kernels.attention.base import AttentionShape
from arbor.model.checkpoint import Checkpoint, ModelSettings
from arbor.model.gguf.header import read_gguf_header
from arbor.model.gguf.weights import read_model
from arbor.model.loading import load_config, locate_model
from arbor.model.parallel.channel import Closed
from arbor.model.parallel.devices import SHARE, devices_of, nccl_settings
from arbor.model.parallel.layers import Summed, divide, put_on
from arbor.model.parallel.shards import division_of
from arbor.model.parallel.watch import Watch
from arbor.model.placement import resolve_device
from arbor.model.runner import ModelRunner
from arbor.model.weights import shapes_of_rank

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets torch see so many GPUs."""

    def seen(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(count))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)

    monkeypatch.delenv(SHARE, raising=False)
    return seen


def test_each_rank_has_a_gpu_of_its_own(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(3)
    assert devices_of("auto", 2) == devices_of("cuda", 2) == ["cuda:0", "cuda:1"]
    assert devices_of("cpu", 2) == ["cpu", "cpu"]
    assert nccl_settings(1) == {}
    gpus(2)
    monkeypatch.setenv(SHARE, "1")
    assert devices_of("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    hosts = [nccl_settings(number)["NCCL_HOSTID"] for number in range(3)]
    assert len(set(hosts)) == 3
    gpus(0)
    assert devices_of("auto", 2) == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("device", "tp", "named", "instead"),
    [
        ("cuda", 4, "torch sees 2 GPUs", "--tp 2"),
        ("auto", 3, "torch sees 2 GPUs", "--tp 2"),
        ("cuda:1", 2, "--device cuda:1", "--device cuda;"),
    ],
)
def test_too_few_gpus_are_refused_before_anything_loads(
    gpus: Any, device: str, tp: int, named: str, instead: str
) -> None:
    gpus(2)
    with pytest.raises(UsageError, match=named) as refused:
        Solver("no/such-model", device=device, tp=tp)
    assert refused.value.code == "tp"
    assert instead in refused.value.hint


def test_gpus_that_are_not_there_are_refused(gpus: Any) -> None:
    gpus(0)
    for settings in ({"device": "cuda", "tp": 2}, {"device": "cuda:1"}):
        with pytest.raises(UsageError, match=f"--device {settings['device']}, but torch sees no"):
            Solver(**settings)
    for count, number in ((1, 7), (2, 2), (2, 300)):
        gpus(count)
        with pytest.raises(UsageError, match=f"cuda:{number}, but torch sees {count} GPU") as error:
            Solver("no/such-model", device=f"cuda:{number}")
        assert error.value.code == "device" and f"cuda:{count - 1}" in error.value.hint
        assert resolve_device(f"cuda:0{count - 1}") == torch.device("cuda", count - 1)


def test_a_plan_counts_the_weights_of_one_gpu(gpus: Any) -> None:
    gpus(2)
    one, two = (Checkpoint(ModelSettings(device="cuda", tp=tp)).read().info for tp in (1, 2))
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token
    assert one.weights_bytes / 2 < two.weights_bytes < 0.6 * one.weights_bytes  # one embedding


def test_what_a_rank_attends_is_its_part() -> None:
    shape, config = AttentionShape(8, 2, 16, 16, 0.25), load_config(locate_model("builtin:sapling"))
    heads = config.num_attention_heads, config.num_key_value_heads
    whole = AttentionShape(*heads, 16, 16, 0.25)
    (part,) = shapes_of_rank([whole], division_of(config, 2))
    assert (part.num_qo_heads * 2, part.num_kv_heads * 2) == heads
    config.num_attention_heads = config.num_key_value_heads = 3
    config.hidden_size = 48
    assert shapes_of_rank([shape], division_of(config, 2)) == (shape,)


def test_no_step_runs_ahead_of_other_processes() -> None:
    def ahead(followers: Any) -> Any:
        runner: Any = SimpleNamespace(device=torch.device("cuda"), followers=followers)
        assert ModelRunner.is_asynchronous.fget is not None
        return ModelRunner.is_asynchronous.fget(runner)

    assert ahead(None)
    assert not ahead(object())


@pytest.mark.parametrize("tied", [False, True])
def test_a_gpu_is_given_its_part_of_a_gguf_file_alone(tied: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_random(path, "llama", ("Q4_K", "Q6_K"), tied=tied)
    header, config = read_gguf_header(path), load_config(locate_model(str(path)))

    def read(linear_only: bool) -> Any:
        dtype = torch.float32
        return read_model(header, config, dtype, CPU, dense=True, linear_only=linear_only)

    whole, parts, division = read(False), [], division_of(config, 2)
    for number in range(2):
        ranks: Any = SimpleNamespace(number=number, count=2, device=CPU)
        part = read(True)
        divide(part, division, ranks)
        put_on(part, CPU)
        parts.append(part)
        kept = {each.untyped_storage().data_ptr(): each for each in part.parameters()}
        numbers = sum(each.untyped_storage().nbytes() // 4 for each in kept.values())
        assert numbers == pytest.approx(division.numbers, rel=0.01)
        assert not any(type(each).__name__ == "BlockLinear" for each in part.modules())
    for name, module in whole.named_modules():
        if isinstance(module, nn.Linear):
            both = [each.get_submodule(name) for each in parts]
            weights = [getattr(each, "part", each).weight for each in both]
            dim = 1 if isinstance(both[0], Summed) else 0
            assert torch.equal(torch.cat(weights, dim), module.weight)
    put_on(part, torch.device("meta"))  # another device
    head, embedding = part.lm_head.part.weight, part.get_input_embeddings().weight
    assert (head.untyped_storage()._cdata == embedding.untyped_storage()._cdata) is tied


def test_what_waits_for_a_process_that_ended_is_given_up() -> None:
    given_up = threading.Event()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    watch = Watch([process], given_up.set)
    try:
        with watch.over(60):
            pass
        assert not given_up.is_set()
        process.kill()
        with pytest.raises(Closed), watch.over(60):
            assert given_up.wait(60)
    finally:
        process.kill()
        process.wait()
        watch.end()


def test_what_waits_too_long_is_given_up() -> None:
    given_up = threading.Event()
    watch = Watch([], given_up.set)
    with pytest.raises(Closed), watch.over(0.01):
        assert given_up.wait(60)
        raise RuntimeError("the communicator was aborted")
