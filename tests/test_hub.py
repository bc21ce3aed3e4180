"""The Hub where it cannot be reached: an answer at once, from the cache or as an error."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from arbor import ModelError, Solver
from arbor.model import hub
from arbor.model.hub import is_reachable
from arbor.model.loading import load_config, load_tokenizer, locate_model


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As without the settings of the other tests: requests may be made, and no proxy is set."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    is_reachable.cache_clear()
    yield
    is_reachable.cache_clear()


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_closed_port_and_a_name_that_nobody_knows_are_not_reachable(closed_port: int) -> None:
    assert not is_reachable(f"http://127.0.0.1:{closed_port}")
    assert not is_reachable("https://no-such-host.invalid")


@pytest.mark.parametrize("model", ["OWNER/MODEL", "OWNER/MODEL/file.gguf"])
def test_an_unreachable_hub_is_an_error_without_retries(
    model: str, monkeypatch: pytest.MonkeyPatch, closed_port: int
) -> None:
    endpoint = f"http://127.0.0.1:{closed_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    tried: list[float] = []
    monkeypatch.setattr("time.sleep", tried.append)
    source = locate_model(model)

    for read in (load_config, load_tokenizer):
        with pytest.raises(ModelError, match="cannot be reached") as refused:
            read(source)
        assert refused.value.code == "offline" and endpoint in refused.value.message
    assert tried == [] and not constants.HF_HUB_OFFLINE


def test_an_adapter_of_an_unreachable_hub_is_an_error_without_retries(
    monkeypatch: pytest.MonkeyPatch, closed_port: int
) -> None:
    pytest.importorskip("peft", reason="the extra `adapters` is not installed")
    endpoint = f"http://127.0.0.1:{closed_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    tried: list[float] = []
    monkeypatch.setattr("time.sleep", tried.append)

    with Solver(adapter="OWNER/ADAPTER") as solver, pytest.raises(ModelError) as refused:
        solver.load()

    assert refused.value.code == "offline" and tried == []
    assert "the adapter OWNER/ADAPTER is not in HF_HOME=" in refused.value.message
    assert endpoint in refused.value.message and "name its directory" in refused.value.hint
