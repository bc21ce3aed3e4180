"""inspect_ai's provider `arbor` and its solver: messages decoded plainly, or searched."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("inspect_ai", reason="the extra `inspect` is not installed")
import anyio
import torch
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ModelOutput,
)
from inspect_ai.tool import ToolCall
from support.run_cli import ROOT, environment

from arbor import Solver, __version__
from arbor.integrations.inspect_ai.model import ArborAPI
from arbor.model.loading import load_model, load_tokenizer, locate_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of inspect's own dependencies
]

SAPLING = "builtin:sapling"
LINE = "4 5 6 10\n"
GREEDY = GenerateConfig(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def plain() -> Iterator[ArborAPI]:
    api = ArborAPI(SAPLING)
    yield api
    api.close()


def message(
    api: ArborAPI, config: GenerateConfig = GREEDY, text: str | list[ChatMessage] = LINE
) -> ModelOutput:
    turns: list[ChatMessage] = [ChatMessageUser(content=text)] if isinstance(text, str) else text
    return asyncio.run(api.generate(turns, [], "none", config))


def search(config: dict[str, Any], **asked: Any) -> GenerateConfig:
    return GenerateConfig(**config, extra_body={"arbor": asked})


# Plain decoding


def test_a_greedy_message_is_that_of_transformers(plain: ArborAPI) -> None:
    location = locate_model(SAPLING)
    model = load_model(location, torch.float32, torch.device("cpu"))
    tokenizer = load_tokenizer(location)
    prompt = torch.tensor([tokenizer.encode(LINE)])
    own = model.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :]

    output = message(plain)

    assert output.completion == tokenizer.decode(own, skip_special_tokens=True)
    assert output.stop_reason == ("stop" if len(own) < 24 else "max_tokens")
    assert output.usage is not None
    assert output.usage.input_tokens == prompt.shape[1]
    assert output.usage.output_tokens == len(own)


def test_equal_choices_are_decoded_once(plain: ArborAPI) -> None:
    one = message(plain)
    three = message(plain, GenerateConfig(temperature=0, max_tokens=24, num_choices=3))

    assert [each.message.text for each in three.choices] == [one.completion] * 3
    assert {each.stop_reason for each in three.choices} == {one.stop_reason}
    assert one.usage is not None and three.usage is not None
    assert three.usage.output_tokens == one.usage.output_tokens


# Searches


def test_a_search_of_a_task_finds_what_the_solver_finds() -> None:
    with Solver(controller="beam", budget=0.5) as solver:
        wanted = solver.solve("4 5 6 10", seed=3)
    api = ArborAPI(SAPLING, controller="beam", task="game24", budget=0.5)

    output = message(api, GenerateConfig(seed=3, num_choices=99), "4 5 6 10")
    api.close()

    assert output.completion == wanted.text
    assert output.metadata is not None
    facts = output.metadata["arbor"]
    assert (facts["answer"], facts["status"]) == (wanted.answer, wanted.finish_reason)
    assert facts["blocks"] == wanted.metrics.blocks
    assert facts["peak_tokens"] == wanted.metrics.peak_tokens
    assert len(output.choices) == max(1, len(wanted.candidates))
    assert output.usage is not None
    assert output.usage.output_tokens == wanted.metrics.tokens_generated > len(wanted.path)


def test_a_path_that_a_limit_cuts_ends_for_want_of_tokens() -> None:
    limits: dict[str, Any] = {"controller": "best-of-n,samples=8", "path_tokens": 34}
    with Solver(**limits) as solver:
        wanted = solver.solve("4 5 6 10", seed=1)
    api = ArborAPI(SAPLING, task="game24", **limits)

    output = message(api, GenerateConfig(seed=1, num_choices=99), "4 5 6 10")
    api.close()

    reasons = [each.stop_reason for each in output.choices]
    assert reasons == ["max_tokens" if each.cut else "stop" for each in wanted.candidates]
    assert wanted.answer is not None and set(reasons) == {"stop", "max_tokens"}


@pytest.mark.parametrize("verifier", ["self", "vote,choices=2"])
def test_near_the_end_of_the_context_a_message_has_the_tokens_that_fit(verifier: str) -> None:
    api = ArborAPI(SAPLING, controller="beam", verifier=verifier, step_tokens=8, max_depth=64)
    tokenizer = api._solver.tokenizer
    context = api._solver.describe().context
    text = tokenizer.decode(tokenizer.encode("7 8 9 10\n" * 999)[: context - 120])
    config = GenerateConfig(max_tokens=400, seed=1)

    output = message(api, config, text)
    full = message(api, config, text + "7 8 9 10\n" * 20)
    api.close()

    assert output.choices[0].stop_reason == "model_length" and output.error is None
    ids = tokenizer.encode(output.completion)
    assert 0 < len(ids) < 120
    assert full.completion == "" and full.choices[0].stop_reason == "model_length"
    assert "no room for a message after it and for the question about it" in str(full.error)


# Refusals


@pytest.mark.parametrize(
    ("turn", "named"),
    [
        (
            ChatMessageAssistant(
                content="", tool_calls=[ToolCall(id="1", function="add", arguments={"a": 1})]
            ),
            "tool calls",
        ),
        (
            ChatMessageAssistant(content=[ContentReasoning(reasoning="x"), ContentText(text="y")]),
            "reasoning_history",
        ),
        (ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AA==")]), "image"),
    ],
    ids=["tool calls", "reasoning", "image"],
)
def test_a_message_with_more_than_text_is_refused(
    turn: ChatMessage, named: str, plain: ArborAPI
) -> None:
    first, last = ChatMessageUser(content="4 5"), ChatMessageUser(content="6 10")
    with pytest.raises(PrerequisiteError, match=named):
        message(plain, text=[first, turn, last])


def test_an_unknown_option_of_the_body_is_refused(plain: ArborAPI) -> None:
    config = GenerateConfig(extra_body={"min_p": 0.5, "arbor": {"controller": "beam"}})
    with pytest.raises(PrerequisiteError, match="min_p"):
        message(plain, config)


def test_a_cancelled_message_gives_its_kv_back(plain: ArborAPI) -> None:
    async def run() -> None:
        asked = search({"max_tokens": 400}, controller="best-of-n,samples=16", step_tokens=8)
        with anyio.move_on_after(0.3) as scope:
            await plain.generate([ChatMessageUser(content=LINE)], [], "none", asked)
        assert scope.cancelled_caught
        shared = plain._shared()
        with anyio.fail_after(20):
            while shared.running:
                await anyio.sleep(0.02)

    asyncio.run(run())

    assert message(plain).completion


# As inspect runs it

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

@task
def game24():
    problems = ["4 5 6 10", "1 2 3 4", "2 3 5 12"]
    return Task([Sample(input=each, target="24") for each in problems], scorer=includes())
"""


def installed(site: Path, *, editable: bool) -> Path:
    """The package as an installer leaves it, so that inspect finds provider and solver."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = site / f"arbor_search-{__version__}.dist-info"
    info.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: arbor-search\nVersion: {__version__}\n"
    (info / "METADATA").write_text(head, encoding="utf-8")
    if editable:
        source = {"url": ROOT.as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(source), encoding="utf-8")
    else:
        (site / "arbor").symlink_to(ROOT / "arbor")
    lines = ["[inspect_ai]"]
    lines += [f"{name} = {value}" for name, value in project["entry-points"]["inspect_ai"].items()]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return site


SOLVER = ["--solver", "arbor/search", "-S", "controller=beam", "-S", "task=game24"]


@pytest.mark.parametrize(
    ("words", "editable"),
    [
        (["-M", "controller=tot,beam=3", "-M", "task=game24", "-M", "budget=0.5"], False),
        (SOLVER, False),
        (SOLVER, True),
    ],
    ids=["model", "solver", "solver of an editable package"],
)
def test_the_command_evaluates_arbor(words: list[str], editable: bool, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    site = installed(tmp_path / "site-packages", editable=editable)
    command = [sys.executable, "-m", "inspect_ai", "eval", "task.py", "--model", f"arbor/{SAPLING}"]
    command += ["--seed", "2", "--log-format", "json", "--log-dir", "logs", "--display", "plain"]

    done = subprocess.run(
        [*command, *words],
        cwd=tmp_path,
        env=environment(PYTHONPATH=":".join((str(site), *sys.path))),
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "logs").glob("*.json")
    log = json.loads(path.read_text(encoding="utf-8"))
    assert log["status"] == "success", log.get("error")
    assert len(log["samples"]) == 3
    for sample in log["samples"]:
        assert sample["output"]["metadata"]["arbor"]["seed"] == 2
        assert sample["output"]["usage"]["output_tokens"] > 20
        assert ("arbor" in sample["store"]) == ("--solver" in words)
