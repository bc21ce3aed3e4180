"""``arbor serve`` as a command: what it refuses, and how it begins and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from support.run_cli import ROOT, Arbor, in_process

from arbor.integrations.server import app
from arbor.integrations.server.serve import serve
from arbor.model.loading import BUILTIN

EXAMPLES = [line.strip() for line in (serve.help or "").splitlines() if "  arbor serve" in line]


@pytest.mark.usefixtures("loaded_once")
@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_its_help_page_runs(
    example: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys.txt").write_text("a-key-of-sixteen-characters\n", encoding="utf-8")
    (tmp_path / "my-model").symlink_to(BUILTIN["sapling"], target_is_directory=True)
    # it answers until a signal ends it, and the usual port may be taken
    bound = app.bound_socket
    monkeypatch.setattr(app, "bound_socket", lambda host, port: bound(host, 0))
    monkeypatch.setattr(app.Server, "run", lambda server, sockets: server.ready())

    ran = in_process(capsys)(*example.split()[1:])

    assert ran.code == 0, ran.err
    assert ran.out


def test_its_help_names_no_default_task_but_says_which_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = in_process(capsys)("serve", "--help-all").out

    option = said[said.index("--task NAME") :].partition("\n  -")[0]
    assert "list tasks" in option and "game24" not in option
    assert "those of the built-in model of 'game24'" in " ".join(said.split())


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--bind", "0.0.0.0"], 2, "has no API keys"),
        (["--bind", "::"], 2, "has no API keys"),
        (["--bind", "example.org"], 2, "has no API keys"),
        (["--budget", "much"], 2, "budget"),
        (["--budget", "25"], 2, "Did you mean 0.25"),
        (["--api-keys", "none.txt"], 4, "No such file"),
        (["--port", "70000"], 2, "65535"),
        (["--controller", "nobody"], 2, "unknown controller"),
        (["--bind", "203.0.113.1", "--api-keys", "keys.txt"], 2, "[address]"),
        (["--bind", "nosuch.invalid", "--api-keys", "keys.txt"], 2, "'nosuch.invalid' is unknown"),
        (["--bind", "a..b", "--api-keys", "keys.txt"], 2, "'a..b' is unknown: no name of a host"),
    ],
)
def test_what_cannot_be_served_is_refused(
    command: Arbor, tmp_path: Path, words: list[str], code: int, says: str
) -> None:
    (tmp_path / "keys.txt").write_text("a-key-of-sixteen-characters\n", encoding="utf-8")

    done = command("serve", *words)

    assert done.code == code and says in done.err, done


@pytest.mark.usefixtures("loaded_once")
def test_a_search_of_its_own_that_it_would_refuse_is_refused_at_the_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = in_process(capsys)("serve", "--port", "0", "--set", "beam=50", "--set", "width=50")

    assert done.code == 2
    assert "5,050 blocks" in done.err and "Give max_expansions=81, or a smaller" in done.err


@pytest.mark.slow
def test_a_second_signal_does_not_wait_and_shows_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "arbor", "serve", "--port", "0", "--json", "--drain", "60"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        ready = json.loads(process.stdout.readline())

        import openai

        fields = {"model": ready["model"], "prompt": "4 5 6 10\n", "max_tokens": 1000, "seed": 1}
        with openai.OpenAI(base_url=f"{ready['url']}/v1", api_key="none") as client:
            stream = client.completions.create(**fields, stream=True)
            next(iter(stream))
            for _ in range(2):
                process.send_signal(signal.SIGINT)
                time.sleep(0.3)
            assert process.wait(30) == 130  # less than it would wait for

        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_what_is_in_progress(number: int) -> None:
    key = "a-key-of-sixteen-characters"
    process = subprocess.Popen(
        [sys.executable, "-m", "arbor", "serve", "--port", "0", "--json", "--drain", "60"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "ARBOR_API_KEYS": key},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        ready = json.loads(process.stdout.readline())
        assert ready["schema"] == "arbor.serve/1" and ready["model"] == "builtin:sapling"

        import openai

        fields = {"model": ready["model"], "prompt": "4 5 6 10\n", "max_tokens": 300, "seed": 1}
        with openai.OpenAI(base_url=f"{ready['url']}/v1", api_key=key, max_retries=0) as client:
            whole = client.completions.create(**fields).choices[0].text
            stream = client.completions.create(**fields, stream=True)
            first = next(iter(stream))
            process.send_signal(number)
            rest = list(stream)

        assert "".join(each.choices[0].text for each in [first, *rest] if each.choices) == whole
        assert rest[-1].choices[0].finish_reason in ("stop", "length")
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


def started(port: int, *words: str) -> tuple[subprocess.Popen[str], str]:
    """A server on a port (0: a free one), ready, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "arbor", "serve", "--port", str(port), "--json", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    return process, str(json.loads(process.stdout.readline())["url"])


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "ratio"), [("0.25", 0.25), ("full", 1.0)])
def test_a_server_begins_with_a_ratio(budget: str, ratio: float) -> None:
    import openai

    process, url = started(0, "--budget", budget)
    with process, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        made = client.chat.completions.create(
            model="builtin:sapling",
            messages=[{"role": "user", "content": "4 5 6 10"}],
            seed=3,
            extra_body={"arbor": {"budget": ratio}},
        )
        assert made.choices[0].arbor["answer"]
        process.kill()


@pytest.mark.slow
def test_a_killed_server_fails_its_clients_at_once_and_starts_again() -> None:
    import openai

    process, url = started(0)
    errors: list[Exception] = []
    begun = threading.Barrier(5)

    def ask(searched: bool) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            try:
                if searched:
                    begun.wait()
                    client.chat.completions.create(
                        model="builtin:sapling",
                        messages=[{"role": "user", "content": "1 1 1 1"}],
                        extra_body={"arbor": {"controller": {"name": "tot", "beam": 60}}},
                    )
                else:
                    chunks = client.completions.create(
                        model="builtin:sapling", prompt="4 5 6 10\n", max_tokens=900, stream=True
                    )
                    for number, _ in enumerate(chunks):
                        if number == 0:
                            begun.wait()
            except Exception as error:
                errors.append(error)

    clients = [threading.Thread(target=ask, args=(number % 2 == 0,)) for number in range(4)]
    with process:
        for each in clients:
            each.start()
        begun.wait()
        process.kill()
        for each in clients:
            each.join(20)

    assert not any(each.is_alive() for each in clients)
    assert [type(error) for error in errors] == [openai.APIConnectionError] * 4, errors
    process, again = started(int(url.rpartition(":")[2]))
    with process, openai.OpenAI(base_url=f"{again}/v1", api_key="none") as client:
        assert again == url
        made = client.completions.create(model="builtin:sapling", prompt="4 5 6 10\n", max_tokens=4)
        assert made.usage is not None and made.usage.completion_tokens == 4
        process.kill()
