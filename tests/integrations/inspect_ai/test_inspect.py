"""inspect_ai's provider `arbor` and its solver: messages decoded plainly, or searched."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("inspect_ai", reason="the extra `inspect` is not installed")
import anyio
import torch
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.model import (
    ChatMessage,
    ChatMessageSystem,
    ChatMessageUser,
    ContentImage,
    GenerateConfig,
    ModelOutput,
)
from inspect_ai.tool import ToolInfo
from support.run_cli import ROOT, environment

from arbor import Solver, __version__
from arbor.errors import BudgetInfeasible
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


def test_a_message_ends_before_a_stop_sequence(plain: ArborAPI) -> None:
    whole = message(plain).completion
    end = whole[5:7]

    output = message(plain, GenerateConfig(temperature=0, max_tokens=24, stop_seqs=[end]))

    assert output.completion == whole[: whole.find(end)]
    assert output.stop_reason == "stop"


def test_every_token_has_its_log_probability(plain: ArborAPI) -> None:
    config = GREEDY.merge(GenerateConfig(logprobs=True))
    choice = message(plain, config).choices[0]
    assert choice.logprobs is not None
    with Solver() as solver:
        before = solver.tokenizer.encode(LINE)
        whole = solver.tokenizer.encode(LINE + choice.message.text)
        (scores,) = solver.logprobs([(before, whole[len(before) :])])

    found = choice.logprobs.content

    assert "".join(each.token for each in found) == choice.message.text
    assert [each.logprob for each in found][: len(scores.logprobs)] == pytest.approx(
        list(scores.logprobs), abs=1e-4
    )


def test_choices_and_epochs_differ_and_a_seed_repeats_them(plain: ArborAPI) -> None:
    config = GenerateConfig(temperature=2, max_tokens=24, num_choices=3)

    one, other = message(plain, config), message(plain, config)
    seeded = config.merge(GenerateConfig(seed=5))
    first, again = message(plain, seeded), message(plain, seeded)

    texts = [[each.message.text for each in output.choices] for output in (one, other)]
    assert len(set(texts[0])) == 3 and texts[0] != texts[1]
    assert first.choices == again.choices or [c.message.text for c in first.choices] == [
        c.message.text for c in again.choices
    ]
    assert first.metadata is not None and first.metadata["arbor"]["seed"] == 5


def test_a_message_that_fills_the_context_says_so(plain: ArborAPI) -> None:
    config = GenerateConfig(max_tokens=10**6, temperature=0)
    too_long = message(plain, config, LINE * 5000)

    assert too_long.stop_reason == "model_length" and too_long.completion == ""
    assert "context" in str(too_long.error)


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


def test_a_search_continues_a_conversation(plain: ArborAPI) -> None:
    asked = search({"max_tokens": 40, "seed": 1}, controller="best-of-n,samples=4", step_tokens=20)

    output, again = message(plain, asked), message(plain, asked)

    assert output.completion == again.completion != ""
    assert output.metadata is not None and output.metadata["arbor"]["finished_paths"] == 4
    assert output.completion != message(plain).completion


def test_a_search_has_the_log_probabilities_of_its_best_path(plain: ArborAPI) -> None:
    asked = search(
        {"max_tokens": 40, "seed": 1, "logprobs": True, "stop_seqs": [" ="]},
        controller="best-of-n,samples=4",
        verifier="exact",
    )

    choice = message(plain, asked).choices[0]

    assert choice.logprobs is not None
    assert "".join(each.token for each in choice.logprobs.content).startswith(choice.message.text)
    assert all(each.logprob <= 0 for each in choice.logprobs.content)
    assert " =" not in choice.message.text


def test_the_command_line_cuts_settings_at_commas() -> None:
    api = ArborAPI(SAPLING, controller=["tot", "beam=3"], task="game24")

    assert api._solver.config["controller"] == {
        **Solver(controller="tot,beam=3").config["controller"]
    }


# Refusals


def without_tools(api: ArborAPI, config: GenerateConfig = GREEDY) -> None:
    message(api, config)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ArborAPI("no/such/model"), "no such directory"),
        (lambda: ArborAPI(SAPLING, controler="tot"), "controler"),
        (lambda: ArborAPI(SAPLING, controller="tott"), "Did you mean 'tot'"),
        (lambda: ArborAPI(SAPLING, concurrency=0), "concurrency"),
    ],
)
def test_an_invalid_model_is_refused_in_a_sentence(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(PrerequisiteError, match=words):
        make()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GenerateConfig(frequency_penalty=1.0), "frequency_penalty"),
        (GenerateConfig(top_logprobs=3, logprobs=True), "top_logprobs"),
        (GenerateConfig(extra_body={"arbor": 3}), "object"),
        (search({}, controller="tot", depth=3), "depth"),
        (search({}, controller="tot", verifier="prm,model=/nowhere"), "model of its own"),
        (search({"stop_seqs": ["x"]}, task="game24"), "stop sequences"),
        (GenerateConfig(temperature=-1), "temperature"),
    ],
)
def test_what_arbor_does_not_have_is_refused(
    plain: ArborAPI, config: GenerateConfig, words: str
) -> None:
    with pytest.raises(PrerequisiteError, match=words):
        message(plain, config)


def test_other_messages_are_refused(plain: ArborAPI) -> None:
    picture = ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AAAA")])
    two: list[ChatMessage] = [ChatMessageUser(content="1 2 3 4"), ChatMessageUser(content="x")]
    system: list[ChatMessage] = [
        ChatMessageSystem(content="Be brief."),
        ChatMessageUser(content="1 2 3 4"),
    ]

    with pytest.raises(PrerequisiteError, match="image"):
        message(plain, GREEDY, [picture])
    with pytest.raises(PrerequisiteError, match="one problem"):
        message(plain, search({}, task="game24"), two)
    with pytest.raises(PrerequisiteError, match="no system message"):
        message(plain, search({}, task="game24"), system)
    with pytest.raises(PrerequisiteError, match="tools"):
        tool = ToolInfo(name="calculator", description="adds")
        asyncio.run(plain.generate([ChatMessageUser(content="x")], [tool], "auto", GREEDY))


def test_a_budget_that_is_too_small_fails_its_own_message(plain: ArborAPI) -> None:
    with pytest.raises(BudgetInfeasible):
        message(plain, search({}, task="game24", budget="10tok"), "4 5 6 10")
    assert message(plain).completion


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


def installed(site: Path) -> Path:
    """The package as an installer leaves it, so that inspect finds provider and solver."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = site / f"arbor_search-{__version__}.dist-info"
    info.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: arbor-search\nVersion: {__version__}\n"
    (info / "METADATA").write_text(head, encoding="utf-8")
    (site / "arbor").symlink_to(ROOT / "arbor")
    lines = ["[inspect_ai]"]
    lines += [f"{name} = {value}" for name, value in project["entry-points"]["inspect_ai"].items()]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return site


@pytest.mark.parametrize(
    "words",
    [
        ["-M", "controller=tot,beam=3", "-M", "task=game24", "-M", "budget=0.5"],
        ["--solver", "arbor/search", "-S", "controller=beam", "-S", "task=game24"],
    ],
    ids=["model", "solver"],
)
def test_the_command_evaluates_arbor(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    site = installed(tmp_path / "site-packages")
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
