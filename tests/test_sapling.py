"""Sapling's files: tokenizer, configuration, weights; what the trainer promises about them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor.tasks.base import Problem
from arbor.tasks.chains import Chains
from arbor.tasks.countdown import Countdown, solve
from arbor.tasks.game24 import Game24
from arbor.tasks.recall import Recall

ROOT = Path(__file__).resolve().parents[1]
SAPLING = ROOT / "arbor" / "sapling"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
pytestmark = pytest.mark.skipif(
    not all((SAPLING / name).exists() for name in FILES), reason="Sapling's files are not there"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SAPLING)


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(SAPLING, dtype=torch.float32).eval()


def script(name: str) -> ModuleType:
    """A file of scripts/ as a module."""
    path = ROOT / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def paths() -> list[tuple[Any, Problem, list[str]]]:
    """A few problems of every task with a full path each."""
    found: list[tuple[Any, Problem, list[str]]] = []
    for game in (Game24(), Countdown(fewest=4, most=4)):
        for problem in game.problems("validation", 8):
            path = solve(problem.data["numbers"], problem.data["target"])
            assert path is not None
            found.append((game, problem, path))
    for words in (Chains(), Recall()):
        for problem in words.problems("validation", 8):
            found.append((words, problem, words.solution(problem)))
    return found


def test_tokens_of_prompt_and_thoughts_join_without_a_seam(tokenizer: Any) -> None:
    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    for task, problem, path in paths():
        parts = [task.prompt(problem), *path, task.question(problem, path).text]
        whole = tokenizer("".join(parts)).input_ids
        joined = [tokenizer.bos_token_id] + [token for part in parts for token in encode(part)]
        assert whole == joined
        assert all(len(encode(thought)) <= task.boundary.max_tokens for thought in path)


def test_only_the_last_token_of_a_thought_holds_a_stop(tokenizer: Any) -> None:
    for task, _, path in paths():
        for thought in path:
            texts = [
                tokenizer.decode([i])
                for i in tokenizer(thought, add_special_tokens=False).input_ids
            ]
            stops = [any(stop in text for stop in task.boundary.stop) for text in texts]
            assert stops == [False] * (len(texts) - 1) + [True]


def test_each_verdict_is_one_token(tokenizer: Any) -> None:
    for task, problem, path in paths():
        for verdict in task.question(problem, path).values:
            assert len(tokenizer(verdict, add_special_tokens=False).input_ids) == 1


def test_digits_are_single_tokens_and_frequent_pieces_are_too(tokenizer: Any) -> None:
    assert len(tokenizer("1234567890", add_special_tokens=False).input_ids) == 10
    pieces = (
        " *",
        " +",
        " -",
        " /",
        " =",
        " (left:",
        ")\n",
        "Target",
        " 4",
        " Amy",
        " Amy has",
        " Amy =",
    )
    for piece in pieces:
        assert len(tokenizer(piece, add_special_tokens=False).input_ids) == 1, piece


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n", "naïve café ☕ 漢字 🌳", "\t\x00\x7f", "a  b   c", "<x> </y>"]
)
def test_any_text_comes_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_random_text_comes_back_and_a_line_break_is_a_seam(tokenizer: Any) -> None:
    @given(st.text(max_size=40), st.text(max_size=40))
    def check(head: str, tail: str) -> None:
        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False).input_ids)

        assert tokenizer.decode(encode(head)) == head
        assert encode(head + "\n") + encode(tail) == encode(head + "\n" + tail)

    check()


def test_special_tokens_and_where_they_go(tokenizer: Any) -> None:
    ids = tokenizer("Target 24").input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in ids[1:]
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


def test_the_configuration_is_a_plain_llama_with_grouped_heads(tokenizer: Any) -> None:
    config = json.loads((SAPLING / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["head_dim"] == 64
    assert config["num_attention_heads"] >= 2 * config["num_key_value_heads"]
    assert config["max_position_embeddings"] >= 2048
    assert config["tie_word_embeddings"]
    assert config["vocab_size"] == len(tokenizer)
    assert (SAPLING / "model.safetensors").stat().st_size <= 40 * 1024 * 1024


def test_the_model_proposes_steps(model: Any, tokenizer: Any) -> None:
    evaluation = script("eval_sapling")
    reasoner = evaluation.Reasoner(model, tokenizer)
    game = Game24()
    prompts = [game.prompt(problem) for problem in game.problems("validation", 8)]
    lines = reasoner.complete(prompts, 1, game.boundary.max_tokens)
    assert all(len(line) == 1 and line[0].endswith(")\n") for line in lines)
    values = reasoner.verdicts([prompts[0] + "Reachable?"], {" yes": 1.0, " no": 0.0})
    assert 0.0 <= values[0] <= 1.0


def test_the_lean_forward_gives_the_logits_of_the_saved_model(model: Any, tokenizer: Any) -> None:
    import torch

    training = script("train_sapling")
    config = model.config
    names = training.Shape.__dataclass_fields__
    sizes = {n: getattr(config, n) for n in names if n not in ("rope_theta", "rms_norm_eps")}
    lean = training.Model(training.Shape(**sizes)).eval()
    training.load_weights(lean, SAPLING)
    ids = torch.tensor(
        [tokenizer("Target 24 (left: 4 5 6 10)\n10 - 4 = 6 (left: 5 6 6)\n").input_ids]
    )
    length = ids.shape[1]
    with torch.inference_mode():
        mask = torch.ones(1, length, length, dtype=torch.bool).tril()
        mine = lean(ids, torch.arange(length)[None], mask) @ lean.embed_tokens.weight.T
        theirs = model(ids).logits
    assert (mine - theirs).abs().max() < 1e-3


def test_a_training_tree_is_seen_as_its_paths(tokenizer: Any) -> None:
    """In a packed row each token sees exactly the tokens before it on its own path."""
    import torch

    training = script("train_sapling")
    trees = training.Trees(
        lambda text: list(tokenizer(text, add_special_tokens=False).input_ids), [1]
    )
    rng = random.Random(5)
    documents = [trees.countdown(rng), trees.chains(rng, 3)]
    batch, rest = training.pack(documents, 1, 512)
    assert not rest
    mask = training.visible(torch.from_numpy(batch.enter), torch.from_numpy(batch.leave)).numpy()
    lines = 0
    for i in range(512):
        seen = mask[0, i].nonzero()[0]
        if batch.ids[0, i] == 0:
            assert seen.tolist() == [i]
            continue
        assert batch.positions[0, seen].tolist() == list(range(batch.positions[0, i] + 1))
        text = tokenizer.decode(batch.ids[0, seen].tolist()[1:])
        assert text.startswith(("Target", "Facts")) or len(seen) == 1
        lines += text.endswith("\n")
    assert lines > 8


def test_training_documents_are_held_out_and_labelled_exactly(tokenizer: Any) -> None:
    training = script("train_sapling")
    trees = training.Trees(
        lambda text: list(tokenizer(text, add_special_tokens=False).input_ids), [1]
    )
    game, rng = Countdown(fewest=2), random.Random(3)
    verdicts = []
    for _ in range(60):
        document = trees.countdown(rng)
        texts: list[list[str]] = []
        for segment in document.segments:
            before = texts[segment.parent] if segment.parent >= 0 else []
            texts.append([*before, tokenizer.decode(segment.tokens).removeprefix("<bos>")])
        head = texts[0][0].removeprefix("Target ").rstrip(")\n")
        target, numbers = head.split(" (left: ")
        problem = game.make([int(n) for n in numbers.split()], int(target))
        assert not (len(numbers.split()) == 4 and target == "24" and int(numbers.split()[-1]) <= 13)
        for path in texts[1:]:
            if path[-1].startswith("Reachable?"):
                yes = path[-1].endswith(" yes")
                assert game.value(problem, path[1:-1]) == float(yes)
                verdicts.append(yes)
    assert 0.25 < sum(verdicts) / len(verdicts) < 0.75


def test_a_tokenizer_that_is_extended_reads_new_names_as_one_token_and_the_rest_as_before(
    tmp_path: Path,
) -> None:
    from tokenizers import Tokenizer

    training = script("train_sapling")
    file = tmp_path / "tokenizer.json"
    file.write_bytes((SAPLING / "tokenizer.json").read_bytes())
    task = Chains(fewest=32, most=32)
    training.extend_tokenizer(file, task.people)

    before = Tokenizer.from_file(str(SAPLING / "tokenizer.json"))
    after = Tokenizer.from_file(str(file))
    for name in task.people:
        for text in (f" {name}", f" {name} has", f" {name} ="):
            assert len(after.encode(text, add_special_tokens=False).ids) == 1
    for problem in Chains().problems("test", 5):
        text = "".join((problem.text, "\n", *Chains().solution(problem)))
        assert after.encode(text).ids == before.encode(text).ids
    (problem,) = task.problems("test", 1)
    text = "".join((problem.text, "\n", *task.solution(problem)))
    assert after.decode(after.encode(text).ids) == text


def test_long_word_problems_fill_long_rows_of_training(tokenizer: Any) -> None:
    training = script("train_sapling")
    trees = training.Trees(
        lambda text: list(tokenizer(text, add_special_tokens=False).input_ids), [1], steps=32
    )
    mix = training.Mix(growing=(1, 6), grown=(1, 6), steps=32, rooms=26, long=2048)
    level = types.SimpleNamespace(value=1.0)
    steps = itertools.islice(training.batches(trees, mix, 0, 0, level), 8)
    longest = max(int(words.positions.max()) for _, words in steps)
    assert longest > 700  # tokens of one path; 16 steps end below 520


def test_several_processes_make_the_steps_of_one(tokenizer: Any) -> None:
    training = script("train_sapling")
    trees = training.Trees(
        lambda text: list(tokenizer(text, add_special_tokens=False).input_ids), [1]
    )
    mix, level = training.Mix(growing=(1, 2)), types.SimpleNamespace(value=0.0)

    def steps(first: int, stride: int, count: int) -> list[list[int]]:
        made = training.batches(trees, mix, 7, first, level, stride)
        return [[int(part.ids.sum()) for part in step] for step in itertools.islice(made, count)]

    alone = steps(0, 1, 6)
    assert len({tuple(step) for step in alone}) == 6
    assert [steps(0, 2, 3), steps(1, 2, 3)] == [alone[::2], alone[1::2]]
