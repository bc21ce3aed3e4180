"""The Solver, with the embedded model: same tree at any budget, valid traces whatever happens,
clear refusals."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.models import ARCHITECTURES, config_of
from support.slow_cases import every, only
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from arbor import Solution, Solver, registry
from arbor.controllers.chain import Chain
from arbor.controllers.tot import ToT
from arbor.errors import BudgetInfeasible, InputError, ModelError, UsageError
from arbor.events import (
    Boundary,
    Ended,
    Event,
    Evicted,
    Forwarded,
    Header,
    Opened,
    Selected,
)
from arbor.model.loading import BUILTIN
from arbor.retention.policy import Policy
from arbor.run.settings import Settings
from arbor.tasks.base import Problem, Task
from arbor.tasks.game24 import Game24
from arbor.trace import Replay, read_trace
from arbor.trace.diff import diff_traces
from arbor.verifiers.base import Inquiry, Verdict

pytestmark = pytest.mark.usefixtures("loaded_once")

SAPLING = BUILTIN["sapling"]
CONTROLLERS = sorted(registry.BUILTIN["controller"])
PUZZLE = "4 5 6 10"
SMALL = ToT(beam=2, width=4)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(SAPLING)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SAPLING)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A directory with a random two-layer Llama that speaks Sapling's tokens."""
    path = tmp_path_factory.mktemp("models") / "small"
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def sized(name: str, tokenizer: Any) -> Any:
    """A random model of an architecture with a vocabulary for the tokenizer."""
    model_type, settings = ARCHITECTURES[name]
    config = config_of(model_type, **settings | {"vocab_size": len(tokenizer)})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def blocks(events: list[Event]) -> dict[int, tuple[int, ...]]:
    """Every closed block's tokens."""
    return {event.node: event.ids for event in events if isinstance(event, Boundary)}


def search(model: Any, **settings: Any) -> tuple[Solution, list[Event]]:
    events: list[Event] = []
    settings = {"controller": SMALL, "verifier": "self", "seed": 1} | settings
    with Solver(model, listeners=[events.append], **settings) as solver:
        return solver.solve(PUZZLE), events


def enough() -> int:
    """An amount that is enough for any tree of `search`."""
    return Solver(controller=SMALL, verifier="self").plan(PUZZLE).enough_tokens


# The main job


def test_the_readme_problem_is_solved_with_the_models_own_judgement() -> None:
    with Solver() as solver:
        solution = solver.solve(PUZZLE)

    assert solution.answer is not None
    assert Game24().grade(Game24().parse(PUZZLE), solution.answer).correct
    assert solution.correct and solution.finish_reason == "solved"
    assert "".join(step.text for step in solution.steps) == solution.text


@pytest.mark.parametrize("deterministic", every(2, [False, True]))
def test_every_feasible_budget_gives_the_same_tree(deterministic: bool) -> None:
    full, events = search("builtin:sapling", deterministic=deterministic)

    for tokens in (50, enough() - 16):
        squeezed, seen = search(
            "builtin:sapling", deterministic=deterministic, budget=f"{tokens}tok", debug=True
        )

        assert blocks(seen) == blocks(events)
        assert squeezed.answer == full.answer
        assert max(e.peak for e in seen if isinstance(e, Forwarded)) <= tokens
        assert squeezed.metrics.tokens_recomputed > 0
        assert squeezed.budget_reached and not full.budget_reached
        assert any(isinstance(e, Evicted) for e in seen)


@pytest.mark.parametrize("dtype", every(2, ["float32", "bfloat16"]))
def test_deterministic_values_are_the_same_bits_at_every_budget(dtype: str) -> None:
    settings = {"deterministic": True, "dtype": dtype}
    full, _ = search("builtin:sapling", **settings)
    smallest = enough()

    squeezed, _ = search("builtin:sapling", budget=f"{smallest}tok", **settings)

    assert squeezed.candidates == full.candidates
    assert squeezed.steps == full.steps


@pytest.mark.parametrize("controller", every(4, CONTROLLERS))
@pytest.mark.parametrize("verifier", only(["exact"], ["exact", "self"]))
def test_every_controller_runs_with_every_verifier(controller: str, verifier: str) -> None:
    solution, events = search("builtin:sapling", controller=controller, verifier=verifier)

    assert isinstance(events[0], Header) and isinstance(events[-1], Ended)
    assert solution.metrics.nodes == sum(isinstance(event, Opened) for event in events)
    assert solution.finish_reason in ("solved", "exhausted")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_a_program_changes_nothing(dtype: torch.dtype) -> None:
    def found() -> list[Any]:
        policy = {"mode": "lossy", "policy": "h2o", "budget": "150tok", "rehydrate": "off"}
        with Solver(controller=SMALL) as lossless, Solver(controller=SMALL, **policy) as lossy:
            beams = lossless.generate(PUZZLE, beams=3, max_tokens=12)
            return [lossless.solve(PUZZLE).text, lossy.solve(PUZZLE).text, beams]

    wanted = found()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert found() == wanted
    finally:
        torch.set_default_dtype(before)


def test_a_problem_made_by_hand_is_read_as_its_text() -> None:
    with Solver(controller="chain") as solver:
        by_hand = Problem("mine", "game24", PUZZLE, expected="24")
        assert solver.solve(by_hand).text == solver.solve(PUZZLE).text
        with pytest.raises(InputError):
            solver.solve(Problem("other", "gsm8k", "What is 2 + 2?"))


def test_the_settings_of_a_run_have_its_own_seed(tmp_path: Path) -> None:
    paths = [tmp_path / "a.arbor.jsonl", tmp_path / "b.arbor.jsonl"]
    with Solver(controller="chain", seed=1) as solver:
        for seed, path in enumerate(paths, 5):
            solution = solver.solve(PUZZLE, seed=seed, trace=path)
            assert solution.config["seed"] == solution.seed == seed
        (failed,) = solver.solve_batch([" "], seed=7, on_error="return")

    assert failed.config["seed"] == failed.seed == 7
    found = diff_traces(*map(read_trace, paths)).settings
    assert [(each.name, each.first, each.second) for each in found] == [("seed", 5, 6)]


# Limits and interruptions


def test_stopping_mid_search_gives_the_best_so_far_and_a_valid_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    solver = Solver(controller=SMALL)

    def stop_in_the_second_round(event: Event) -> None:
        if isinstance(event, Selected):
            rounds.append(event)
            if len(rounds) == 2:
                solver.stop("interrupted")

    rounds: list[Event] = []
    solver.listeners = (stop_in_the_second_round,)
    solution = solver.solve(PUZZLE, trace=path)

    assert solution.finish_reason == "interrupted"
    end = read_trace(path).events[-1]
    assert isinstance(end, Ended) and end.status == "interrupted"


# Sampling


# Other models


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"dtype": "bfloat16"}, "dtype", "the ready model's is float32. Leave dtype out"),
        ({"dtype": "float16"}, "dtype", "the ready model's is float32. Leave dtype out"),
        ({"device": "cuda"}, "device", "the ready model is on cpu. Leave device out"),
    ],
)
def test_a_ready_model_is_not_converted(
    settings: dict[str, str],
    code: str,
    words: str,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    with pytest.raises(UsageError) as error:
        Solver(sized("llama", tokenizer), tokenizer=tokenizer, **settings)

    assert error.value.code == code and words in str(error.value)


def test_a_path_is_of_the_folder_in_which_it_was_named(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small.parent)
    solver = Solver(small.name + "/", controller="chain")
    monkeypatch.chdir(tmp_path)

    assert solver.plan(PUZZLE).prompt_tokens


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0.5}, r"Solver\(sampling=\{'temperature': …\}\)"),
        ({"controller": "tot", "width": 3}, r"Solver\(controller='tot,width=…'\)"),
        ({"max_tokens": 9}, r"solve\(…, max_tokens=…\)"),
        ({"listeners": print}, "a list of functions"),
    ],
)
def test_a_setting_in_the_wrong_place_is_told_the_right_one(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        Solver(**settings)


def test_what_is_no_text_and_no_token_is_refused(small: Path) -> None:
    with Solver(small, controller="chain") as solver:
        for call in (
            lambda: solver.generate([PUZZLE]),
            lambda: solver.logprobs([("text", "text")]),
            lambda: solver.logprobs([1]),
            lambda: solver.solve(PUZZLE, recorded=3),
        ):
            with pytest.raises(UsageError):
                call()


def test_a_ready_model_that_was_packed_is_not_saved(tokenizer: Any, tmp_path: Path) -> None:
    model = sized("llama", tokenizer)
    for _ in range(2):
        with Solver(model, tokenizer=tokenizer, controller="chain", device="cpu") as solver:
            solver.solve(PUZZLE)

    with pytest.raises(ModelError, match="model-packed"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_a_directory_without_a_tokenizer_is_refused_before_the_weights_load(
    tmp_path: Path, name: str
) -> None:
    """For some architectures transformers builds a tokenizer without words, and reports nothing."""
    model_type, settings = ARCHITECTURES[name]
    config_of(model_type, **settings).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    solver = Solver(tmp_path)

    for ask in (solver.plan, solver.describe, lambda: solver.solve(PUZZLE)):
        with pytest.raises(ModelError, match="no readable tokenizer") as error:
            ask()
        assert error.value.code == "model-incomplete"


# Budgets and problems


def test_an_infeasible_budget_names_the_smallest_that_is_planned() -> None:
    with pytest.raises(BudgetInfeasible) as error:
        Solver(budget="20tok").solve(PUZZLE)
    smallest = error.value.needed
    with pytest.raises(BudgetInfeasible):
        Solver(budget=f"{smallest - 1}tok").plan(PUZZLE)

    assert Solver(budget=f"{smallest}tok").plan(PUZZLE).budget_tokens == smallest


def test_a_path_that_outgrows_an_amount_ends_the_search_with_its_tree_and_what_it_needs(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.arbor.jsonl"
    with Solver(controller="chain", verifier="exact", step_tokens=16, budget="30tok") as solver:
        with pytest.raises(BudgetInfeasible) as error:
            solver.solve(PUZZLE, trace=path)

        assert error.value.budget == 30 < error.value.needed < error.value.data["enough"]
        assert f"{error.value.data['enough']}tok is enough" in error.value.hint
        replay = Replay.of(read_trace(path))
        assert replay.problems == [] and replay.ended is not None
        assert replay.ended.status == "error" and len(replay.blocks) > 1
        again = solver.solve(PUZZLE, budget=0.1)
        enough = solver.solve(PUZZLE, budget=f"{error.value.data['enough']}tok")
    assert again.text == enough.text


def test_the_trace_of_the_largest_seed_can_be_read_back(tmp_path: Path) -> None:
    most, path = 2**63 - 1, tmp_path / "run.arbor.jsonl"
    with Solver(controller="chain", seed=most) as solver:
        solver.solve(PUZZLE, trace=path)
        header = read_trace(path).header
        assert header is not None and header.seed == most
        with pytest.raises(UsageError, match=f"at most {most}"):
            solver.solve(PUZZLE, seed=most + 1)
        with pytest.raises(UsageError, match=f"at most {most}"):
            list(solver.rollouts([PUZZLE], group=2))
    with pytest.raises(UsageError, match=f"at most {most}"):
        Solver(seed=most + 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_depth": 0},
        {"step_tokens": -1},
        {"max_expansions": 0},
        {"device": "tpu0"},
        {"seed": -1},
        {"seed": 0.5},
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Solver(**settings)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"keep_kv_size": "1GiB"}, "keep_kv"),
        ({"disk_dir": "."}, "disk"),
        ({"host_bits": 8}, "host"),
        ({"mode": "lossy", "share": "prompts", "share_threshold": 0.9}, "share=similar"),
    ],
)
def test_a_setting_without_effect_for_want_of_another_is_refused(
    settings: dict[str, Any], needed: str
) -> None:
    with pytest.raises(UsageError, match=f"without {needed}") as error:
        Settings.of(settings)
    assert error.value.code == "setting-unused"


@dataclass(frozen=True)
class OwnChain(Chain):
    """A chain of a user, whose search reads no values."""


def test_a_search_of_a_user_says_which_values_it_reads() -> None:
    with Solver(controller=OwnChain(), verifier="exact") as own, Solver(controller=Chain()) as ours:
        assert own.solve(PUZZLE).metrics.verified == ours.solve(PUZZLE).metrics.verified == 0


@dataclass(frozen=True)
class Saying:
    """A verifier that returns the same for any candidates."""

    verdict: Any
    needs_model: ClassVar[bool] = False

    def verify(self, *given: Any) -> Any:
        return self.verdict


@pytest.mark.parametrize(
    ("verdict", "code", "words"),
    [
        ([1.0], "verifier-answer", r"\[1.0\], not a Verdict"),
        (None, "verifier-answer", "None, not a Verdict"),
        (Verdict(0.5, 0), "verifier-answer", "not a Verdict with a tuple of values"),  # type: ignore[arg-type]
        (Verdict((0.5,), -1), "verifier-answer", "{'asked': -1}, not a number of questions"),
        (Verdict((0.5,), 0.5), "verifier-answer", "{'asked': 0.5}, not a number"),  # type: ignore[arg-type]
        (Verdict((0.5, 0.5), 0), "verdict-count", "gave 2 values for 1 candidates"),
        (Verdict(("high",), 0), "verdict-range", "at 'high'"),  # type: ignore[arg-type]
        (Verdict((True,), 0), "verdict-range", "at True"),
        (Verdict((float("nan"),), 0), "verdict-range", "at nan"),
    ],
)
def test_what_a_verifier_returns_is_checked(verdict: Any, code: str, words: str) -> None:
    chain = {"name": "tot", "beam": 1, "width": 1}
    with (
        Solver(controller=chain, verifier=Saying(verdict)) as solver,
        pytest.raises(UsageError, match=words) as error,
    ):
        solver.solve(PUZZLE)
    assert error.value.code == code and "Saying" in error.value.message


@dataclass(frozen=True)
class Halves:
    """A verifier that gives one half to all, and may empty the list it was given."""

    empties: bool
    needs_model: ClassVar[bool] = False

    def verify(self, task: Any, problem: Any, candidates: list[Any], *rest: Any) -> Verdict:
        count = len(candidates)
        if self.empties:
            candidates.clear()
        return Verdict((0.5,) * count, 0)


def test_a_verifier_that_changes_its_candidates_changes_no_search() -> None:
    found = []
    for empties in (False, True):
        tot = {"name": "tot", "beam": 2, "width": 2}
        with Solver(controller=tot, verifier=Halves(empties)) as solver:
            solution = solver.solve(PUZZLE)
        found.append((solution.text, solution.steps, solution.metrics.nodes))
    assert found[0] == found[1]


@dataclass(frozen=True)
class Asking:
    """A verifier that asks one thing after each candidate, at once or through `inquire`, and not
    in problems that begin with 1."""

    questions: Any
    ready: bool = False
    needs_model: ClassVar[bool] = True

    def inquire(self, task: Task, problem: Problem, candidates: Any, encoder: Any) -> Any:
        if not self.ready or problem.text.startswith("1"):
            return None
        return Inquiry(candidates, self.questions, lambda logits: Verdict((0.5,), 1))

    def verify(self, task: Task, problem: Problem, candidates: Any, engine: Any) -> Verdict:
        if not problem.text.startswith("1"):
            engine.ask(candidates, self.questions)
        return Verdict((0.5,) * len(candidates), len(candidates))


@pytest.mark.parametrize(
    ("questions", "words"),
    [
        ([[5], [5]], "questions: 2, blocks: 1; engine.ask takes one question for each"),
        ([[]], "a question has no token: engine.ask takes at least one"),
        ([[999_999]], r"999999 is no token id: engine.ask takes 0 to \d+"),
        ([[-1]], "-1 is no token id"),
        ([[0.5]], "0.5 is no token id"),
        (
            ["Reachable?"],
            r"a question is a text: engine.ask takes token ids, engine.encode\(text\)",
        ),
        (None, "TypeError"),
    ],
)
def test_what_a_verifier_asks_is_checked_and_ends_its_own_problem_only(
    questions: Any, words: str
) -> None:
    chain = {"name": "tot", "beam": 1, "width": 1}
    with Solver(controller=chain, verifier=Asking(questions)) as solver:
        with pytest.raises(UsageError, match=words) as error:
            solver.solve(PUZZLE)
        solved, failed = solver.solve_batch(["1 2 3 4", PUZZLE], on_error="return")
    with (
        Solver(controller=chain, verifier=Asking(questions, ready=True)) as solver,
        pytest.raises(UsageError, match="verifier-answer") as answered,
    ):
        solver.solve(PUZZLE)

    assert error.value.code == "verifier-raised" and error.value.exit_code == 2
    assert "Asking" in error.value.message and "(test_solver.py:" in error.value.message
    assert failed.error and failed.error["code"] == "verifier-raised" and solved.error is None
    assert "token ids of the model" in answered.value.message
    assert questions is None or re.search(words, answered.value.message)


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes: ' not' and ' no' begin with the same tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    rules = Tokenizer(BPE({sign: number for number, sign in enumerate(alphabet)}, []))
    rules.pre_tokenizer, rules.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=rules)


def test_verdicts_that_begin_alike_are_refused_before_the_weights_load() -> None:
    tokenizer = letters()
    model = sized("llama", tokenizer)
    settings: dict[str, Any] = {"tokenizer": tokenizer, "controller": "chain,samples=2"}
    settings |= {"step_tokens": 4, "max_depth": 1}
    alike = {"name": "reasoning", "yes": " not", "shots": 0}
    solver = Solver(model, task=alike, **settings)

    for ask in (solver.plan, solver.solve):
        with pytest.raises(UsageError, match="verdict-ambiguous") as error:
            ask("1+1?")
        assert "--task reasoning,yes=right,no=wrong" in error.value.hint
    assert solver.checkpoint._weights is None
    Solver(model, task=alike, verifier=Saying(None), **settings).plan("1+1?")
    for told_apart in ("reasoning,shots=0", "reasoning,shots=0,yes=right,no=wrong"):
        with Solver(model, task=told_apart, **settings) as other:
            assert other.solve("1+1?").metrics.asked > 0


class Half:
    """Not quite a component of any kind."""

    def start(self, tree: Any, max_depth: int) -> object:
        return object()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"controller": Half()}, r"cannot be the controller: it has no 'max_blocks'"),
        ({"verifier": Half()}, r"cannot be the verifier: it has no 'needs_model' and no 'verify'"),
        (
            {"policy": Half()},
            r"cannot be the policy: it is not an arbor\.retention\.policy\.Policy",
        ),
        ({"policy": Policy(Half())}, r"cannot be the policy: it has no 'counts'"),  # type: ignore[arg-type]
        ({"task": Half()}, r"cannot be the task: it has no 'name'"),
    ],
)
def test_what_lacks_something_is_refused_before_anything_loads(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as error:
        Solver(**settings)
    assert error.value.code == "component-incomplete"


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ({}, "reentry"),
        ({"mode": "lossy"}, "ends"),
        ({"mode": "lossy", "rehydrate": "off"}, "ends"),
        ({"mode": "lossy", "rehydrate": "selective"}, "reentry"),
        ({"mode": "lossy", "policy": "h2o"}, "h2o"),
    ],
    ids=str,
)
def test_the_default_policy_is_another_one_where_what_leaves_is_lost(
    settings: dict[str, Any], policy: str
) -> None:
    solver = Solver(**settings)

    assert solver.policy.name == policy
    assert solver.config["policy"]["name"] == policy
    assert Solver.from_config(solver.config).policy == solver.policy
