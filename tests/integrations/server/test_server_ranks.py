"""A server whose model is held by two processes: arrivals, clients that go away, and a lost one."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from http_requests import serving, until

from arbor import Solver

pytestmark = pytest.mark.slow
CHAT = {
    "model": "sapling",
    "messages": [{"role": "user", "content": "4 5 6 10"}],
    "seed": 1,
    "max_tokens": 40,
}


def test_requests_arrive_leave_and_end_together() -> None:
    with Solver(device="cpu", tp=2) as solver, Solver(device="cpu") as alone:
        solver.load()
        with serving(alone) as server:
            right = server.send("/v1/chat/completions", CHAT)[2]["choices"]
        with serving(solver) as server:
            for _ in range(3):
                server.begin("/v1/chat/completions", {**CHAT, "n": 2}).close()
            with ThreadPoolExecutor(4) as clients:
                sent = [clients.submit(server.send, "/v1/chat/completions", CHAT) for _ in range(4)]
            assert [each.result()[0] for each in sent] == [200] * 4
            assert all(each.result()[2]["choices"] == right for each in sent)
            until(lambda: server.is_idle)
            followers = solver.engine.runner.followers
            assert followers is not None
            os.kill(followers.processes[0].pid, signal.SIGKILL)
            assert server.send("/v1/chat/completions", CHAT)[0] == 500
            until(lambda: server.service.lost is not None)
        assert "SIGKILL" in str(server.service.lost)
