"""New weights in a loaded model: its searches are those of one that was loaded with them."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_files import ARCHITECTURES, write_random
from support.models import Words, build, config_of, random_model
from support.slow_cases import drawn, every, only
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import arbor
from arbor import Solver, UsageError
from arbor.events import Ended, Event
from arbor.kernels.linear.blocks import BlockEmbedding, BlockLinear
from arbor.kernels.linear.layers import PackedLinear
from arbor.kernels.native import native_library
from arbor.model import weights as loading
from arbor.model.gguf.conversion import header_given
from arbor.model.gguf.header import read_gguf_header
from arbor.model.kv_identity import kv_identity
from arbor.model.loading import load_config, locate_model
from arbor.run.rollout import Rollout
from arbor.support.read_write_lock import ReadWriteLock

SAPLING = Path(arbor.__file__).parent / "sapling"
PUZZLES = ("4 5 6 10", "3 3 8 8", "1 2 3 4", "2 2 6 6", "5 5 5 1")
SMALL: dict[str, Any] = {
    "controller": "tot,width=2,beam=2",
    "step_tokens": 8,
    "max_expansions": 2,
    "dtype": "float32",
}
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def small() -> Any:
    """A small random model whose head is tied to its embedding, for the tokenizer of Sapling."""
    return random_model(
        config_of(
            "llama",
            vocab_size=640,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
    )


@pytest.fixture(scope="module")
def folder(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its files."""
    path = tmp_path_factory.mktemp("small")
    small.save_pretrained(path)
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SAPLING / each, path)
    return path


@torch.no_grad()
def moved(model: Any, seed: int, part: float = 1.0) -> Weights:
    """Weights of a model after a step in a random direction; of some tensors, in their order."""
    generator = torch.Generator().manual_seed(seed)
    named = dict(model.named_parameters())
    some = dict(list(named.items())[: max(1, int(part * len(named)))])
    return {
        name: each + 0.02 * each.std() * torch.randn(each.shape, generator=generator)
        for name, each in some.items()
    }


def loaded_with(model: Any, *updates: Weights, **settings: Any) -> Solver:
    """A solver of another model that had these weights before it was loaded."""
    own = copy.deepcopy(model)
    for each in updates:
        own.load_state_dict(each, strict=False)
    tokenizer = AutoTokenizer.from_pretrained(SAPLING)
    return Solver(own, tokenizer=tokenizer, **SMALL | settings)


def bits(rollouts: Iterator[Rollout]) -> list[Any]:
    """All numbers of finished trees."""
    names = ("tokens", "logprobs", "drawn", "starts", "parents", "values", "leaves")
    return [[getattr(each, name).tobytes() for name in names] for each in rollouts]


def searched(solver: Solver, *puzzles: str, **options: Any) -> list[Any]:
    return bits(solver.rollouts(puzzles or PUZZLES[:1], **options))


@settings(max_examples=4)
@given(
    updates=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([0.1, 1.0])), min_size=1, max_size=2
    ),
    before=st.integers(0, 2),
    tier=st.sampled_from(["none", "host", "kept"]),
    share=st.sampled_from(["exact", "off"]),
    fused=st.booleans(),
    form=st.sampled_from(["mapping", "pairs"]),
)
def test_searches_are_those_of_a_model_loaded_with_the_weights(
    updates: list[tuple[int, float]],
    before: int,
    tier: str,
    share: Any,
    fused: bool,
    form: str,
    small: Any,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    given: dict[str, Any] = {"share": share, "debug": True, "deterministic": True}
    if tier == "host":
        given |= {"host": "1MiB", "budget": 0.5}
    if tier == "kept":
        given["keep_kv"] = tmp_path_factory.mktemp("kept")
    new = [moved(small, seed, part) for seed, part in updates]
    with pytest.MonkeyPatch.context() as patch:
        if not fused:
            patch.setattr("arbor.model.weights.fused_ops", lambda device: None)
        with Solver(folder, **SMALL | given) as solver:
            for each in new:
                searched(solver, *PUZZLES[:before])
                solver.update_weights(each if form == "mapping" else iter(each.items()))
            found = searched(solver, *PUZZLES[:2])
        with loaded_with(small, *new, deterministic=True) as fresh:
            assert found == searched(fresh, *PUZZLES[:2])


@pytest.mark.slow
def test_kept_prompts_of_former_weights_are_not_read(
    small: Any, folder: Path, tmp_path: Path
) -> None:
    new, kept = moved(small, 1), tmp_path / "kept"
    task: dict[str, Any] = {**SMALL, "task": "reasoning"}
    problem = "Alice has 12 apples and gives 3 of them to Bob, who has 5 of his own. Who has more?"

    def files() -> int:
        return len(list(kept.rglob("*.kv")))

    with Solver(folder, **task, keep_kv=kept) as solver:
        solver.solve(problem)
        former = files()
        assert former
        solver.update_weights(new)
        found = searched(solver, problem)
        assert files() == 2 * former
    with loaded_with(small, new, task="reasoning") as fresh:
        assert found == searched(fresh, problem)
    with Solver(folder, **task, keep_kv=kept) as later:  # equal weights read what they kept
        later.update_weights(new)
        assert searched(later, problem) == found
        assert files() == 2 * former


@pytest.mark.slow
def test_the_trees_of_a_batch_end_with_the_weights_they_began_with(
    small: Any, folder: Path
) -> None:
    new = moved(small, 1)
    with Solver(folder, **SMALL) as solver:
        jobs = [(puzzle, {"trace_level": "tokens"}) for puzzle in PUZZLES]
        results = solver.as_completed(iter(jobs), concurrency=2)
        first = next(results)
        with pytest.raises(UsageError, match="solver-busy") as refused:
            solver.update_weights(new)
        assert "drain=True" in refused.value.hint
        solver.update_weights(new, drain=True)
        found = dict([first, *results])
        digest = solver.checkpoint.updated

    assert sorted(found) == list(range(len(PUZZLES)))
    updated = [found[place].config.get("updated_weights") for place in range(len(PUZZLES))]
    began = updated.index(digest)
    assert 1 < began < 4
    assert updated == [None] * began + [digest] * (len(PUZZLES) - began)
    with Solver(folder, **SMALL) as former, loaded_with(small, new) as fresh:
        for place, puzzle in enumerate(PUZZLES):
            other = (fresh if updated[place] else former).solve(puzzle)
            assert found[place].candidates == other.candidates


def test_an_error_in_a_search_that_ends_early_is_the_loops(small: Any, folder: Path) -> None:
    def listen(place: int, event: Event) -> None:
        if place == 2 and isinstance(event, Ended):
            raise LookupError("mine")

    places = []
    with Solver(folder, **SMALL) as solver:
        jobs = [(each, {"max_tokens": 60 * place + 1}) for place, each in enumerate(PUZZLES[:4])]
        results = solver.as_completed(iter(jobs), concurrency=3, listen=listen)
        places.append(next(results)[0])
        solver.update_weights(moved(small, 1), drain=True)
        assert solver.checkpoint.updated
        with pytest.raises(LookupError, match="mine"):
            places.extend(place for place, _ in results)
        assert places == [0, 1]
        assert solver.solve(PUZZLES[0]).config["updated_weights"] == solver.checkpoint.updated


@pytest.mark.slow
def test_an_endless_loop_over_rollouts_goes_on_with_new_weights(small: Any, folder: Path) -> None:
    def forever() -> Iterator[str]:
        while True:
            yield PUZZLES[0]

    new = [moved(small, seed) for seed in (1, 2)]
    with Solver(folder, **SMALL) as solver:
        rollouts = solver.rollouts(forever(), group=2)
        found = []
        for each in new:
            found += [next(rollouts), next(rollouts)]
            solver.update_weights(each, drain=True)
        for rollout in rollouts:
            if rollout.solution.config.get("updated_weights") == solver.checkpoint.updated:
                break
        last = rollout
        rollouts.close()  # type: ignore[attr-defined]

    with loaded_with(small, *new) as fresh:
        (other,) = fresh.rollouts(PUZZLES[:1], seed=last.solution.seed)
        assert bits(iter([last])) == bits(iter([other]))


def test_another_thread_waits_for_a_loop(small: Any, folder: Path) -> None:
    new = moved(small, 1)
    with Solver(folder, **SMALL) as solver:
        results = solver.as_completed([(each, {}) for each in PUZZLES], concurrency=2)
        next(results)
        waiting = threading.Thread(target=solver.update_weights, args=[new], kwargs={"drain": True})
        waiting.start()
        while not solver.checkpoint.use.wanted:
            pass
        updated = [solution.config.get("updated_weights") for _, solution in results]
        waiting.join()

        assert updated[0] is None
        assert updated[1:] == [solver.checkpoint.updated] * 3


def test_new_weights_are_due_unless_they_wait_for_another_reading() -> None:
    use = ReadWriteLock()
    with use.announced(), use.waiting():
        assert use.is_due
    with use.reading(), use.announced():
        assert use.is_due
        with use.reading():
            assert not use.is_due
        with use.waiting():
            assert not use.is_due
        assert use.is_due
    assert not use.is_due


def test_a_loop_over_a_closed_solver_goes_on_with_the_models_own_weights(
    small: Any, folder: Path
) -> None:
    jobs = [(each, {}) for each in PUZZLES[:3]]
    with Solver(folder, **SMALL) as solver:
        own = [result.candidates for _, result in solver.as_completed(jobs)]
        solver.update_weights(moved(small, 1))
        results = solver.as_completed(jobs, concurrency=1)
        assert next(results)[1].candidates != own[0]
        solver.close()
        assert [result.candidates for _, result in results] == own[1:]


def test_what_waits_for_the_end_of_readings_is_called_at_the_last() -> None:
    use, calls = ReadWriteLock(), []
    use.when_unread(lambda: calls.append("at once"))
    with use.reading(), use.reading():
        use.when_unread(lambda: calls.append("later"))
        assert calls == ["at once"]
    with use.reading():
        assert calls == ["at once", "later"]


def test_streams_end_first(small: Any, folder: Path) -> None:
    new = moved(small, 1)
    with Solver(folder, **SMALL) as solver:
        before = solver.solve(PUZZLES[0])
        stream = solver.stream(PUZZLES[0])
        next(iter(stream))
        with pytest.raises(UsageError, match="solver-busy"):
            solver.update_weights(new)
        solver.update_weights(new, drain=True)
        assert stream.solution.candidates == before.candidates
        with loaded_with(small, new) as fresh:
            assert searched(solver) == searched(fresh)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "other", only(["batch"], ["stream", "queue", "coroutine", "batch", "thread"])
)
def test_another_thread_waits_for_what_a_loop_waits_for(
    other: str, small: Any, folder: Path
) -> None:
    new = moved(small, 1)
    with Solver(folder, **SMALL) as first, Solver(folder, **SMALL) as second:
        second.checkpoint = first.checkpoint
        results = first.as_completed([(each, {}) for each in PUZZLES[:3]], concurrency=1)
        next(results)
        queue = [second.stream(each) for each in PUZZLES * 2] if other == "queue" else []
        drain = threading.Thread(target=first.update_weights, args=[new], kwargs={"drain": True})
        drain.start()
        while not first.checkpoint.use.wanted:
            pass
        if other == "stream":
            stream = second.stream(PUZZLES[0])
            assert list(stream)
            found = [stream.solution]
        elif other == "queue":
            found = [each.solution for each in queue]
        elif other == "coroutine":
            found = [asyncio.run(second.asolve(PUZZLES[0]))]
        elif other == "batch":
            found = second.solve_batch(PUZZLES, concurrency=2)
        else:
            thread = threading.Thread(target=second.solve, args=[PUZZLES[0]])
            thread.start()
            while not second._busy.locked():
                pass
            found = [second.solve(PUZZLES[0])]
            thread.join(10)
        assert all("updated_weights" not in each.config for each in found)
        updated = [solution.config.get("updated_weights") for _, solution in results]
        drain.join()
        assert updated == [first.checkpoint.updated] * 2


@pytest.mark.parametrize("drain", every(2, [False, True]))
def test_a_listener_cannot_change_what_its_search_reads(
    drain: bool, small: Any, folder: Path
) -> None:
    errors = []

    def listener(event: Event) -> None:
        if not errors:
            with pytest.raises(UsageError, match="solver-busy") as refused:
                solver.update_weights(moved(small, 1), drain=drain)
            errors.append(refused.value)

    with Solver(folder, **SMALL, listeners=[listener]) as solver:
        solver.solve(PUZZLES[0])
        assert errors
        list(solver.as_completed([(PUZZLES[0], {})]))
        assert solver.checkpoint.updated is None


@pytest.mark.timeout(60)
def test_an_iterator_of_new_weights_never_waits_for_its_own_update(
    small: Any, folder: Path
) -> None:
    new = moved(small, 1)
    with Solver(folder, **SMALL) as solver, Solver(folder, **SMALL) as other:
        other.checkpoint = solver.checkpoint

        def pairs() -> Iterator[tuple[str, Tensor]]:
            for wait in (
                lambda: solver.logprobs([([1], [2])]),
                lambda: other.solve(PUZZLES[0]),
                lambda: solver.stream(PUZZLES[0]).solution,
                lambda: asyncio.run(solver.asolve(PUZZLES[0])),
                lambda: solver.update_weights(new, drain=True),
            ):
                with pytest.raises(UsageError, match="solver-busy"):
                    wait()
            yield from new.items()

        solver.update_weights(pairs())
        with loaded_with(small, new) as fresh:
            assert searched(solver) == searched(fresh)


def test_a_shared_checkpoint_is_updated_for_all(small: Any, folder: Path) -> None:
    new = moved(small, 1)
    with Solver(folder, **SMALL) as first, Solver(folder, **SMALL) as second:
        second.checkpoint = first.checkpoint
        before = searched(first)
        assert searched(second) == before
        results = second.as_completed([(each, {}) for each in PUZZLES], concurrency=1)
        next(results)
        for drain in (False, True):
            with pytest.raises(UsageError, match="solver-busy"):
                first.update_weights(new, drain=drain)
        results.close()
        first.update_weights(new)
        after = searched(second)
        assert after != before
        assert after == searched(first)
        with loaded_with(small, new) as fresh:
            assert after == searched(fresh)


def test_a_ready_model_is_updated(small: Any) -> None:
    new = moved(small, 1)
    with loaded_with(small) as solver, loaded_with(small, new) as fresh:
        searched(solver)
        solver.update_weights(new)
        assert searched(solver) == searched(fresh)


@pytest.mark.parametrize(
    ("name", "dtype"),
    drawn(
        ["gpt2", "qwen2", "gemma3_text", "mixtral", "phi3", "glm4"],
        [torch.float32, torch.bfloat16],
    ),
)
def test_architectures_are_updated(name: str, dtype: torch.dtype) -> None:
    model = build(name).to(dtype)
    new = {key: each.to(dtype) for key, each in moved(model.float(), 1).items()}
    model = model.to(dtype)
    other = copy.deepcopy(model)
    other.load_state_dict(new, strict=False)
    pairs = [([5, 6, 7], [8, 9, 10, 11])]
    same: dict[str, Any] = {"tokenizer": Words(), "device": "cpu", "task": "reasoning"}
    with Solver(model, **same) as solver, Solver(other, **same) as fresh:
        before = solver.logprobs(pairs)
        solver.update_weights(new)
        assert solver.logprobs(pairs) == fresh.logprobs(pairs) != before


def test_layers_keep_a_dtype_of_their_own() -> None:
    experts = {"num_experts": 4, "moe_topk": 2, "head_dim": 16}
    model = random_model(config_of("hunyuan_v1_moe", **experts)).to(torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.gate.wg.float()  # as it is made, and loaded
    same = {name: each.clone() for name, each in model.state_dict().items()}
    pairs = [([5, 6, 7], [8, 9, 10, 11])]
    with Solver(model, tokenizer=Words(), device="cpu", task="reasoning") as solver:
        before = solver.logprobs(pairs)
        solver.update_weights(same)
        assert solver.logprobs(pairs) == before
        assert model.model.layers[1].mlp.gate.wg.weight.dtype == torch.float32


def test_tied_weights_change_together(small: Any, folder: Path) -> None:
    new = moved(small, 1)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    assert embedding in new
    by_head = {head: new[embedding]}
    with Solver(folder, **SMALL) as solver, loaded_with(small, by_head) as fresh:
        solver.update_weights(by_head)
        assert searched(solver) == searched(fresh)
        one = solver.checkpoint.updated
        solver.update_weights({embedding: new[embedding], head: new[embedding]})
        assert solver.checkpoint.updated == one


NORM = "model.norm.weight"
REFUSED: Mapping[str, tuple[Any, str, str]] = {
    "unknown": (lambda good: {"model.norm.wieght": good[NORM]}, "no 'model.norm.wieght'", NORM),
    "shape": (lambda good: {NORM: good[NORM][:-1]}, "and was given as", "state_dict"),
    "nan": (lambda good: {NORM: good[NORM] * torch.nan}, f"'{NORM}' holds numbers", ""),
    "infinite": (lambda good: {NORM: good[NORM].double() * 1e300}, "float32 does not", ""),
    "integers": (lambda good: {NORM: good[NORM].long()}, "int64", "floating-point"),
    "no memory": (lambda good: {NORM: good[NORM].to("meta")}, "on meta", "dense"),
    "sparse": (lambda good: {NORM: good[NORM].to_sparse()}, "sparse", "dense"),
    "numpy": (lambda good: {NORM: good[NORM].numpy()}, "is a ndarray", "full_tensor()"),
    "a path": (lambda good: "model.safetensors", "given as str", "state_dict()"),
    "a model": (lambda good: torch.nn.Linear(1, 1), "given as Linear", "state_dict()"),
    "no pairs": (lambda good: [good[NORM]], "given as list", "pairs"),
    "nothing": (lambda good: iter(()), "no weights", "once"),
    "twice": (
        lambda good: [(NORM, good[NORM]), (NORM, good[NORM] + 1)],
        "two values for",
        "",
    ),
    "untied": (
        lambda good: {
            "model.embed_tokens.weight": good["model.embed_tokens.weight"],
            "lm_head.weight": good["model.embed_tokens.weight"] + 1,
        },
        "'lm_head.weight'",
        "",
    ),
}


def test_what_does_not_fit_is_refused_and_changes_nothing(small: Any, folder: Path) -> None:
    good = moved(small, 1)
    with Solver(folder, **SMALL) as solver:
        before = searched(solver)
        runner = solver.checkpoint.load().runner
        for make, message, hint in REFUSED.values():
            last = make(good)
            bad = {**good, **last} if isinstance(last, dict) else last
            with pytest.raises(UsageError, match="updated-weights") as refused:
                solver.update_weights(bad)
            assert message in refused.value.message
            assert hint in refused.value.hint
        assert solver.checkpoint.load().runner is runner
        assert solver.checkpoint.updated is None
        assert searched(solver) == before


def test_rounded_and_divided_weights_are_refused(small: Any, folder: Path) -> None:
    new = moved(small, 1)
    if native_library() is not None:
        with Solver(folder, **SMALL, weights="int8") as solver:
            with pytest.raises(UsageError, match="int8") as refused:
                solver.update_weights(new)
            assert refused.value.code == "weights"
    with Solver(folder, **SMALL) as solver:
        solver.setup = dataclasses.replace(solver.setup, tp=2)
        with pytest.raises(UsageError, match="--tp 2"):
            solver.update_weights(new)


def test_quantised_layers_are_refused(small: Any) -> None:
    with loaded_with(small) as solver:
        solver.load()
        norm = solver.checkpoint.load().runner.model.model.norm
        norm.weight = torch.nn.Parameter(norm.weight.to(torch.int8), requires_grad=False)
        with pytest.raises(UsageError, match="quantised"):
            solver.update_weights(moved(small, 1))


@pytest.mark.slow
def test_records_name_the_weights(small: Any, folder: Path, tmp_path: Path) -> None:
    new = moved(small, 1)
    with Solver(folder, **SMALL) as solver:
        identity = _identity(solver)
        assert solver.solve(PUZZLES[0]).config.get("updated_weights") is None
        solver.update_weights(new)
        solution = solver.solve(PUZZLES[0], trace=tmp_path / "run.arbor.jsonl")
        digest = solution.config["updated_weights"]
        assert digest in (tmp_path / "run.arbor.jsonl").read_text().partition("\n")[0]
        assert _identity(solver) != identity
        with pytest.raises(UsageError, match="updated-weights"):
            Solver.from_config(solution.config)
        with pytest.raises(UsageError, match="workers-model"):
            _ = solver.unrecorded
        solver.update_weights(moved(small, 2))
        assert solver.checkpoint.updated != digest
        pairs = list(new.items())
        for some in (pairs[9:], pairs[:9]):  # the digest is that of the weights, however they came
            solver.update_weights(some)
        assert solver.checkpoint.updated == digest
    assert solver.checkpoint.updated is None  # closed
    with Solver(folder, **SMALL) as other:
        assert searched(solver) == searched(other)


def _identity(solver: Solver) -> str | None:
    loaded, checkpoint = solver.checkpoint.load(), solver.checkpoint
    return kv_identity(
        loaded.runner,
        checkpoint.source,
        loaded.backend,
        deterministic=False,
        updated=checkpoint.updated,
    )


def test_the_former_weights_are_back_if_the_model_cannot_be_prepared_with_new_ones(
    folder: Path, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (moved(small, seed) for seed in (1, 2, 3))

    def fails(*given: Any) -> None:
        raise MemoryError

    with Solver(folder, **SMALL) as solver:
        for new, last in ((second, None), (third, first)):
            if last is not None:
                solver.update_weights(last)
            before, digest = searched(solver), solver.checkpoint.updated
            with monkeypatch.context() as patch:
                patch.setattr(loading, "_fuse", fails)
                with pytest.raises(MemoryError):
                    solver.update_weights(new)
            assert solver.checkpoint.updated == digest
            assert searched(solver) == before


def test_a_model_whose_decoder_has_a_config_of_its_own_is_updated_and_taken_again() -> None:
    text = {"model_type": "qwen2", "use_sliding_window": False}
    text = {**config_of("qwen2").to_dict(), **text}
    image = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 32}
    image |= {"mlp_dim": 8, "output_channels": 8, "model_type": "got_ocr2_vision"}
    config = AutoConfig.for_model("got_ocr2", text_config=text, vision_config=image)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    same: dict[str, Any] = {"tokenizer": Words(), "task": "reasoning"}
    pairs, new = [([5, 6], [7, 8])], moved(model, 1)
    with Solver(copy.deepcopy(model), **same) as solver:
        solver.logprobs(pairs)
        solver.update_weights(new)
        after = solver.logprobs(pairs)
    model.load_state_dict(new, strict=False)
    for _ in range(2):
        with Solver(model, **same) as solver:
            assert solver.logprobs(pairs) == after


# Blocks of GGUF files


IN_BLOCKS = [
    (each, tied) for each in ARCHITECTURES if each != "starcoder2" for tied in (False, True)
]


@pytest.mark.parametrize(("architecture", "tied"), only([("llama", True)], IN_BLOCKS))
def test_blocks_become_dense_where_they_are_updated(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_random(path, architecture, ("Q8_0", "Q4_K"), tied)
    pairs = [([5, 6, 7], [8, 9, 10, 11])]
    with Solver(path, task="reasoning", dtype="float32") as solver:
        before = solver.logprobs(pairs)
        model = solver.checkpoint.load().runner.model
        unloaded = AutoModelForCausalLM.from_config(model.config)
        names = [name for name in unloaded.state_dict() if "layers.1." not in name]
        new = {name: each for name, each in moved(unloaded, 1).items() if name in names}
        solver.update_weights(new)
        after = solver.logprobs(pairs)
        assert after != before
        if native_library() is not None:
            kinds = [type(each) for each in model.modules()]
            assert PackedLinear in kinds and BlockLinear in kinds
            assert not isinstance(model.lm_head, BlockLinear)
            embedding = model.get_input_embeddings()
            assert isinstance(embedding, BlockEmbedding)
            assert embedding.table.kind == "F32"
    with Solver(path, task="reasoning", dtype="float32") as fresh:
        fresh.update_weights(new)
        assert fresh.logprobs(pairs) == after

    dense = _decoded(path)
    dense.load_state_dict(new, strict=False)
    with torch.no_grad():
        logits = dense(torch.tensor([[5, 6, 7, 8, 9, 10, 11]])).logits[0, 2:-1]
    wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor([[8], [9], [10], [11]]))
    assert after[0] is not None
    assert abs(after[0].total - float(wanted.sum())) < 1e-3


def _decoded(path: Path) -> Any:
    config = load_config(locate_model(path))
    with header_given(read_gguf_header(path)) as (folder, file):
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, config=config, dtype=torch.float32
        )
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.1, 1.0])
def test_smollm2_is_updated(smollm2: Path, part: float) -> None:
    same: dict[str, Any] = {**SMALL, "task": "reasoning", "max_expansions": 2, "dtype": "float32"}
    problem = "What is 2+3?"
    with Solver(smollm2, **same) as solver:
        before = searched(solver, problem)
        unloaded = AutoModelForCausalLM.from_config(solver.checkpoint.load().runner.model.config)
        new = moved(unloaded, 1, part)
        solver.update_weights(new)
        after = searched(solver, problem)
    assert after != before
    with Solver(smollm2, **same) as fresh:
        fresh.update_weights(new)
        assert searched(fresh, problem) == after
    if part == 1.0:
        tokenizer = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
        unloaded.load_state_dict(new, strict=False)
        with Solver(unloaded, tokenizer=tokenizer, **same) as ready:
            assert np.array_equal(searched(ready, problem), after)
