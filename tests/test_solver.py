"""The Solver, with the embedded model: same tree at any budget, valid traces whatever happens,
clear refusals."""

from __future__ import annotations

import inspect
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.models import ARCHITECTURES, config_of
from support.slow_cases import only
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

from arbor import Metrics, Sampling, Solution, Solver, registry
from arbor.controllers.tot import ToT
from arbor.errors import BudgetInfeasible, InputError, ModelError, UnknownName, UsageError
from arbor.events import (
    Boundary,
    Ended,
    Event,
    Evicted,
    Forwarded,
    Header,
    Opened,
    Selected,
    Verified,
)
from arbor.kernels.linear import PackedLinear
from arbor.metrics import MetricsFold
from arbor.model.checkpoint import Checkpoint
from arbor.model.loading import BUILTIN
from arbor.model.plan import least_saved_reads
from arbor.retention.allocators.belady import Belady
from arbor.retention.base import Blocks, Ints, Scorer
from arbor.retention.policy import Policy
from arbor.tasks.game24 import Game24
from arbor.trace import Replay, TraceWriter, read_trace
from arbor.verifiers.base import Verdict

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


def test_a_solution_survives_json() -> None:
    solution, _ = search("builtin:sapling")

    assert Solution.from_dict(json.loads(json.dumps(solution.to_dict()))) == solution


def test_the_same_seed_gives_the_same_tree_and_another_seed_another() -> None:
    _, first = search("builtin:sapling")
    _, again = search("builtin:sapling")
    _, other = search("builtin:sapling", seed=2)

    assert blocks(first) == blocks(again)
    assert blocks(first) != blocks(other)


@pytest.mark.parametrize("deterministic", [False, True])
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_values_are_the_same_bits_at_every_budget(dtype: str) -> None:
    settings = {"deterministic": True, "dtype": dtype}
    full, _ = search("builtin:sapling", **settings)
    smallest = enough()

    squeezed, _ = search("builtin:sapling", budget=f"{smallest}tok", **settings)

    assert squeezed.candidates == full.candidates
    assert squeezed.steps == full.steps


def test_deterministic_is_refused_where_experts_depend_on_the_batch(tokenizer: Any) -> None:
    model = sized("mixtral", tokenizer)

    with pytest.raises(UsageError) as error:
        search(model, tokenizer=tokenizer, deterministic=True)

    assert error.value.code == "deterministic"
    assert "model_type 'mixtral'" in str(error.value) and "MixtralExperts" in str(error.value)
    assert "model.layers.0.mlp.experts" in error.value.data["layers"]


def test_deterministic_on_a_gpu_attends_by_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr("arbor.model.checkpoint.resolve_device", lambda device: cuda)
    monkeypatch.setattr("arbor.model.placement.find_spec", lambda name: object())

    solver = Solver(deterministic=True)

    assert solver.checkpoint.backend_name(solver.describe()) == "invariant"


def test_a_ready_model_that_ran_before_becomes_deterministic(tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(SAPLING)
    Solver(model, tokenizer=tokenizer, device="cpu").load()

    Solver(model, tokenizer=tokenizer, device="cpu", deterministic=True).load()

    layers = [each for each in model.modules() if isinstance(each, PackedLinear)]
    assert layers and all(each.deterministic for each in layers)
    assert not any(type(each) is torch.nn.Linear for each in model.modules())


def test_deterministic_results_agree_with_the_fast_ones_within_tolerance() -> None:
    fast, _ = search("builtin:sapling")
    slow, _ = search("builtin:sapling", deterministic=True)

    assert [c.node for c in fast.candidates] == [c.node for c in slow.candidates]
    for one, other in zip(fast.candidates, slow.candidates, strict=True):
        assert one.value == pytest.approx(other.value, abs=1e-4)


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("verifier", only(["exact"], ["exact", "self"]))
def test_every_controller_runs_with_every_verifier(controller: str, verifier: str) -> None:
    solution, events = search("builtin:sapling", controller=controller, verifier=verifier)

    assert isinstance(events[0], Header) and isinstance(events[-1], Ended)
    assert solution.metrics.nodes == sum(isinstance(event, Opened) for event in events)
    assert solution.finish_reason in ("solved", "exhausted")


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_every_controller_stops_at_the_limit_of_expansions(controller: str) -> None:
    events: list[Event] = []
    with Solver(controller=controller, max_expansions=3, listeners=[events.append]) as solver:
        status = solver.solve("1 1 1 1").finish_reason  # unsolvable: no search stops at a proof

    grown = sum(isinstance(event, Selected) and len(event.leaves) for event in events)
    assert grown <= 3
    assert status == "limit" or (status == "exhausted" and grown < 3)


# Trace and metrics


def test_replaying_the_trace_gives_the_engines_counters(tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    with Solver(controller=SMALL, budget=0.25) as solver:
        solution = solver.solve(PUZZLE, trace=path)

    trace = read_trace(path)
    fold = MetricsFold()
    for event in trace.events:
        fold(event)
    reported, folded = solution.metrics.to_dict(), fold.metrics().to_dict()
    for clock in ("wall_s", "tok_per_s"):
        reported.pop(clock), folded.pop(clock)
    assert folded == pytest.approx(reported)
    end = trace.events[-1]
    assert isinstance(end, Ended)
    assert Metrics.from_dict(end.metrics).peak_tokens == solution.metrics.peak_tokens
    assert solution.trace_path == str(path)


def test_a_config_builds_the_same_solver() -> None:
    with Solver(controller="beam", budget="0.5", sampling=Sampling(0.5), max_depth=3) as solver:
        again = Solver.from_config(json.loads(json.dumps(solver.config)))

    assert again.config == solver.config
    assert again.controller == solver.controller


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


def test_a_timeout_ends_the_search() -> None:
    with Solver() as solver:
        solution = solver.solve(PUZZLE, timeout=0.0)

    assert solution.finish_reason == "timeout"
    assert solution.answer is None


def test_a_limit_on_expansions_is_kept() -> None:
    solution, events = search("builtin:sapling", max_expansions=3)

    grown = sum(len(event.leaves) for event in events if isinstance(event, Selected))
    assert grown <= 3
    assert solution.metrics.expansions == grown


def test_an_exception_in_a_listener_ends_the_run_and_closes_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"

    def fail(event: Event) -> None:
        if isinstance(event, Boundary):
            raise RuntimeError("listener")

    with Solver(listeners=[fail]) as solver, pytest.raises(RuntimeError, match="listener"):
        solver.solve(PUZZLE, trace=path)

    end = read_trace(path).events[-1]
    assert isinstance(end, Ended) and end.status == "error"
    solver.listeners = ()
    assert solver.solve(PUZZLE).finish_reason in ("solved", "exhausted")


def test_a_stream_gives_the_events_of_the_run_and_the_solution() -> None:
    with Solver() as solver:
        stream = solver.stream(PUZZLE)
        events = list(stream)

        assert isinstance(events[0], Header) and isinstance(events[-1], Ended)
        again = solver.solve(PUZZLE)
        assert stream.solution.candidates == again.candidates
        assert stream.solution.steps == again.steps


def test_a_stream_can_be_stopped() -> None:
    with Solver() as solver:
        stream = solver.stream(PUZZLE)
        for event in stream:
            if isinstance(event, Boundary):
                stream.stop()

        assert stream.solution.finish_reason == "interrupted"


# Sampling


def test_sampling_defaults_are_the_models_own(small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "own")
    said = {"do_sample": True, "temperature": 0.6, "top_p": 0.8, "top_k": 20}
    (tmp_path / "own" / "generation_config.json").write_text(json.dumps(said))

    assert Solver(tmp_path / "own").sampling == Sampling(0.6, 0.8, 20)
    assert Solver(tmp_path / "own", sampling={"top_k": 5}).sampling == Sampling(0.6, 0.8, 5)
    assert Solver(tmp_path / "own", sampling=Sampling(0)).sampling == Sampling(0)


def test_a_model_that_does_not_sample_gets_the_papers_defaults(small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "greedy")
    (tmp_path / "greedy" / "generation_config.json").write_text(json.dumps({"do_sample": False}))

    assert Solver(tmp_path / "greedy").sampling == Sampling(temperature=0.7, top_p=0.9)


def test_invalid_sampling_is_refused_before_anything_loads() -> None:
    with pytest.raises(UsageError, match="temperature"):
        Solver(sampling={"temperature": -1.0})


# Other models


def test_a_model_directory_and_the_ready_model_give_the_same_tree(small: Path) -> None:
    _, from_directory = search(small)
    ready = AutoModelForCausalLM.from_pretrained(small)
    _, from_ready = search(ready, tokenizer=AutoTokenizer.from_pretrained(small))

    assert blocks(from_directory) == blocks(from_ready)


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


def test_dtype_and_device_are_those_of_the_ready_model(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked: list[str] = []
    chosen = Checkpoint.backend_name

    def backend_name(self: Checkpoint, info: Any) -> str:
        asked.append(info.dtype)
        return chosen(self, info)

    monkeypatch.setattr(Checkpoint, "backend_name", backend_name)
    model = sized("llama", tokenizer).to(torch.bfloat16)
    model.config.dtype = "float32"

    solver = Solver(model, tokenizer=tokenizer, dtype="bfloat16", deterministic=True)
    solver.load()

    assert solver.device == solver.engine.runner.device == torch.device("cpu")
    assert solver.engine.runner.dtype == torch.bfloat16
    assert asked == ["bfloat16"]
    assert solver.describe().dtype == "bfloat16"


def test_a_missing_model_says_where_models_are(tmp_path: Path, small: Path) -> None:
    with pytest.raises(ModelError) as error:
        Solver(small.parent / "nowhere")

    assert error.value.code == "model-not-found"
    assert str(small) in error.value.hint


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


def test_a_directory_without_weights_is_refused_before_anything_loads(
    tmp_path: Path, small: Path
) -> None:
    shutil.copy(small / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").touch()

    with pytest.raises(ModelError) as error:
        Solver(tmp_path)

    assert error.value.code == "model-incomplete"
    assert "pytorch_model.bin" in error.value.message


def test_weights_cut_short_are_refused_by_name(tmp_path: Path, small: Path) -> None:
    shutil.copytree(small, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])

    with pytest.raises(ModelError) as error:
        Solver(tmp_path / "cut").load()

    assert error.value.code == "model-incomplete"


def test_a_hub_model_that_is_not_cached_is_refused_offline() -> None:
    with pytest.raises(ModelError) as error:
        Solver("nobody/nothing").plan(PUZZLE)

    assert error.value.code in ("offline", "model-not-found")


def test_an_unsupported_architecture_is_refused_before_its_weights(tmp_path: Path) -> None:
    config = {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    shutil.copy(SAPLING / "tokenizer.json", tmp_path)
    shutil.copy(SAPLING / "tokenizer_config.json", tmp_path)

    with pytest.raises(ModelError) as error:
        Solver(tmp_path).plan(PUZZLE)

    assert error.value.code == "arch-unsupported"
    assert "mamba2" in error.value.message


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

        assert error.value.budget == 30 < error.value.needed
        replay = Replay.of(read_trace(path))
        assert replay.problems == [] and replay.ended is not None
        assert replay.ended.status == "error" and len(replay.blocks) > 1
        again = solver.solve(PUZZLE, budget=0.1)
    assert again.text


def test_an_overlong_problem_is_refused(small: Path) -> None:
    with pytest.raises(InputError) as error:
        Solver(small, step_tokens=200).plan(PUZZLE)

    assert error.value.code == "problem-too-long"
    assert "256" in error.value.message
    assert error.value.hint.startswith("Use --max-depth 1, or --step-tokens ")
    for flag, name in (("--max-depth", "max_depth"), ("--step-tokens", "step_tokens")):
        most = int(error.value.hint.split(f"{flag} ")[1].split(",")[0].rstrip("."))
        settings = {"step_tokens": 200, name: most}
        Solver(small, **settings).plan(PUZZLE)
        with pytest.raises(InputError):
            Solver(small, **settings | {name: most + 1}).plan(PUZZLE)


def test_lossy_mode_keeps_fewer_tokens_and_needs_the_same_positions(small: Path) -> None:
    with pytest.raises(InputError) as error:
        Solver(small, step_tokens=200, mode="lossy", budget="240tok").plan(PUZZLE)

    assert error.value.code == "problem-too-long"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"controller": "tott"}, "tot"),
        ({"verifier": "exac"}, "exact"),
        ({"task": "game25"}, "game24"),
        ({"model": "builtin:saplin"}, "builtin:sapling"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(
    settings: dict[str, Any], name: str
) -> None:
    with pytest.raises(UnknownName, match=f"Did you mean '{name}'"):
        Solver(**settings)


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


def test_a_seed_below_zero_is_refused_before_anything_loads() -> None:
    solver = Solver()

    with pytest.raises(UsageError, match="seed is -1"):
        solver.solve(PUZZLE, seed=-1)

    assert solver.checkpoint._files is None


@pytest.mark.parametrize("budget", [0.5, "3532tok"])
def test_a_policy_that_evicts_nothing_needs_full_retention(budget: float | str) -> None:
    solver = Solver(policy="full", budget=budget)

    with pytest.raises(BudgetInfeasible, match=r"the policy 'full', which evicts nothing") as error:
        solver.solve(PUZZLE)

    plan = solver.plan(PUZZLE, budget="full")
    assert error.value.needed == plan.smallest_tokens == plan.full_tokens == plan.budget_tokens
    amount = solver.plan(PUZZLE, budget=f"{plan.full_tokens}tok")
    assert amount.budget_tokens == plan.budget_tokens and amount.part is None
    assert solver.checkpoint._weights is None


@pytest.mark.parametrize("problem", [24, None, b"4 5 6 10", ["4 5 6 10"], 2.5])
def test_a_problem_of_another_type_is_named(problem: Any) -> None:
    solver = Solver()

    for ask in (solver.solve, solver.stream, solver.plan if problem is not None else solver.solve):
        with pytest.raises(UsageError, match=r"problem-type.*As in solve\(\"4 5 6 10\"\)") as error:
            ask(problem)
        assert f"{type(problem).__name__}: {problem!r}" in error.value.message
    assert solver.checkpoint._weights is None


def test_one_problem_is_not_many() -> None:
    with pytest.raises(UsageError, match="problem-type"):
        Solver().solve_batch(PUZZLE)


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


def test_values_of_other_kinds_of_number_are_floats() -> None:
    values: list[object] = []

    def listen(event: Event) -> None:
        if isinstance(event, Verified):
            values.extend(event.values)

    verdict = Verdict((np.float32(0.5),), 0)  # type: ignore[arg-type]
    chain = {"name": "tot", "beam": 1, "width": 1}
    with Solver(controller=chain, verifier=Saying(verdict), listeners=[listen]) as solver:
        solver.solve(PUZZLE)

    assert values and {type(value) for value in values} == {float}


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


@dataclass(frozen=True)
class Shallow:
    """An allocator of one's own."""

    reserve: int = 0

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        return blocks.floor


class Latest:
    """A scorer of one's own."""

    observes = False

    def scores(self, tokens: Any) -> Any:
        return tokens.position


@pytest.mark.parametrize("given", [Shallow(), Shallow, Policy(Shallow())])
def test_an_allocator_is_a_policy_with_the_defaults(given: Any) -> None:
    solver = Solver(policy=given)

    assert solver.policy == Policy(Shallow())
    assert Solver.from_config(solver.config).policy == solver.policy


def test_a_scorer_is_not_a_policy_and_the_error_says_what_to_write() -> None:
    with pytest.raises(UsageError, match=r"but a scorer: write Policy\(allocator, Latest\(…\)\)"):
        Solver(policy=Latest())  # type: ignore[arg-type]


def test_a_search_that_lacks_something_is_named() -> None:
    class Controller(Half):
        def max_blocks(self, max_depth: int) -> int:
            return 3

    with pytest.raises(UsageError, match=r"the controller's search, object, lacks something"):
        Solver(controller=Controller()).solve(PUZZLE)


def test_a_generation_config_that_says_nothing_sensible_is_named(small: Path) -> None:
    place = small.parent / "hot"
    shutil.copytree(small, place)
    (place / "generation_config.json").write_text('{"do_sample": true, "temperature": "hot"}')

    with pytest.raises(ModelError, match=r"generation_config\.json .*'hot'") as error:
        _ = Solver(place).sampling
    assert error.value.code == "model-incomplete"


def test_an_unreadable_generation_config_is_left_out(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = small.parent / "torn"
    shutil.copytree(small, place)
    (place / "generation_config.json").write_text("{")

    assert Solver(place).sampling == Sampling()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "generation_config.json" in caplog.text and "is left out" in caplog.text


def warned(place: Path, generation: dict[str, Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of loading a model with such a generation config, and of a search with it."""
    (place / "generation_config.json").write_text(json.dumps(generation))
    caplog.clear()
    solver = Solver(place, device="cpu")
    assert solver.sampling
    solver.load()
    solver.load()
    own = [each for each in caplog.records if each.name.startswith("arbor")]
    return [each.getMessage() for each in own if each.levelname == "WARNING"]


@pytest.mark.usefixtures("loads_itself")
def test_settings_of_a_generation_config_that_are_left_out_are_named_once(
    small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "penalised"
    shutil.copytree(small, place)
    applied = {"do_sample": True, "temperature": 0.6, "top_p": 0.8, "top_k": 20, "max_length": 99}
    ids = {"eos_token_id": [2, 3], "pad_token_id": 0, "transformers_version": "5.0.0"}
    neutral = {"repetition_penalty": 1.0, "min_p": 0.0, "no_repeat_ngram_size": 0, "typical_p": 1}
    empty = {"bad_words_ids": None, "suppress_tokens": [], "min_length": 0, "guidance_scale": 1}
    own = {"min_p": 0.05, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3}

    assert warned(place, {**applied, **ids, **neutral, **empty}, caplog) == []
    (warning,) = warned(place, {**applied, **ids, **neutral, **own}, caplog)
    assert "sets repetition_penalty, no_repeat_ngram_size, min_p, which" in warning
    assert str(place) in warning
    # transformers applies min_p only where it samples
    (warning,) = warned(place, {**ids, **own, "do_sample": False}, caplog)
    assert "sets repetition_penalty, no_repeat_ngram_size, which" in warning


@pytest.mark.usefixtures("loads_itself")
def test_the_log_says_what_was_loaded_searched_and_found(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "arbor")
    with Solver(controller=SMALL) as solver:
        solver.solve(PUZZLE)

    reported = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [text.split(": ")[0] for level, text in reported if level == "INFO"] == [
        "game24 of 11 tokens, seed 0",
        "builtin:sapling",
        "solved",
    ]
    grown = [entry for entry in reported if entry[1].endswith("leaves grow")]
    assert grown[0] == ("DEBUG", "1 blocks, 1 leaves grow")
    assert PUZZLE not in caplog.text


def test_the_clairvoyant_knows_the_future_of_its_own_search_only(tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    with Solver(controller=SMALL, policy="belady", budget=0.5) as solver:
        with pytest.raises(UsageError, match="belady-blind"):
            solver.solve(PUZZLE)
        Solver(controller=SMALL).solve(PUZZLE, trace=path)
        for options in ({"problem": "1 2 3 4"}, {"problem": PUZZLE, "seed": 1}):
            with pytest.raises(UsageError, match="recorded-other"):
                solver.solve(**options, recorded=path)
        quiet, headless = tmp_path / "quiet.jsonl", tmp_path / "headless.jsonl"
        Solver(controller=SMALL).solve(PUZZLE, trace=TraceWriter(quiet, text="none"))
        headless.write_bytes(path.read_bytes().split(b"\n", 1)[1])
        for options in ({"seed": 1, "recorded": quiet}, {"recorded": headless}):
            with pytest.raises(UsageError, match="recorded-other"):
                solver.solve(PUZZLE, **options)
        for known in (path, quiet):
            assert solver.solve(PUZZLE, recorded=known).answer is not None


def test_a_policy_says_itself_that_it_needs_a_recorded_run(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Prophet:
        needs_recording: ClassVar[bool] = True

        def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
            return Belady().counts(blocks, room, scorer)

    path = tmp_path / "run.arbor.jsonl"
    Solver(controller=SMALL).solve(PUZZLE, trace=path)
    with Solver(controller=SMALL, policy=Policy(Prophet())) as solver:
        with pytest.raises(UsageError, match="the policy 'Prophet' needs a recorded run"):
            solver.solve(PUZZLE)
        assert solver.solve(PUZZLE, recorded=path).answer is not None


def test_levels_of_a_cascade_have_to_pay_on_a_gpu_only() -> None:
    assert least_saved_reads(torch.device("cpu")) == 0
    assert least_saved_reads(torch.device("cuda:0")) > 0


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


def test_scores_after_a_stop_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are scored in the order of their tokens, not of the list."""
    from arbor.engine import likelihood

    scoring = likelihood.score_tokens

    def stopped(*given: Any) -> Iterator[Any]:
        for batch in scoring(*given):
            solver.stop()
            yield batch

    monkeypatch.setattr(likelihood, "score_tokens", stopped)
    monkeypatch.setattr("arbor.run.scoring.SLOTS", 4)
    with Solver() as solver:
        texts = [solver.tokenizer.encode(f"{number} 5 6 10") for number in (9, 4, 7)]
        pairs = [(text[:1], text[1:]) for text in texts]
        found = solver.logprobs(pairs)
        alone = [solver.logprobs([pair])[0] for pair in pairs]

    assert len(found) == 3 and None in found
    assert any(each is not None for each in found)
    for each, right in zip(found, alone, strict=True):
        assert each is None or right is None or each.total == pytest.approx(right.total, abs=1e-4)


def test_a_setting_of_the_solver_is_no_option_of_a_run() -> None:
    with Solver() as solver:
        for search in (
            lambda: solver.solve("4 5 6 10", max_expansions=3),  # type: ignore[call-arg]
            lambda: next(solver.imap(["4 5 6 10"], max_expansions=3)),  # type: ignore[call-arg]
            lambda: solver.stream("4 5 6 10", max_expansions=3),  # type: ignore[call-arg]
        ):
            with pytest.raises(UsageError, match=r"Solver\(max_expansions=…\)") as refused:
                search()
            assert refused.value.code == "unknown-setting"
            assert "Did you mean" not in refused.value.hint


def test_an_unknown_keyword_is_an_error_with_the_closest_one() -> None:
    with Solver() as solver:
        for call, owner, meant in (
            (lambda: Solver(contoller="tot"), "the solver has", "controller"),  # type: ignore[call-arg]
            (lambda: solver.plan("4 5 6 10", max_dept=3), "a plan has", "max_depth"),  # type: ignore[call-arg]
            (lambda: solver.generate("4", beam=3), "a generation has", "beams"),  # type: ignore[call-arg]
            (lambda: solver.solve("4 5 6 10", bugdet=1), "a run has", "budget"),  # type: ignore[call-arg]
        ):
            with pytest.raises(UsageError, match=f"Did you mean '{meant}'") as refused:
                call()
            assert refused.value.code == "unknown-setting"
            assert refused.value.message.startswith(f"{owner} no setting")
        with pytest.raises(TypeError, match="missing"):
            solver.generate()  # type: ignore[call-arg]
    assert next(iter(inspect.signature(Solver).parameters)) == "model"
