"""Workers where Ray is not installed: one error that names the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.run_cli import in_process

from arbor import Workers
from arbor.errors import UsageError


def test_without_ray_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(UsageError, match=r"pip install 'arbor-search\[ray\]'") as raised:
        Workers({"task": "game24"}, 2)

    assert raised.value.code == "ray-missing"


def test_the_command_without_ray_is_one_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)

    ran = in_process(capsys)("eval", "chains", "--limit", "2", "--workers", "2")

    assert ran.code == 2 and not Path("runs").exists()
    assert "arbor: error: [ray-missing]" in ran.err and "arbor-search[ray]" in ran.err
