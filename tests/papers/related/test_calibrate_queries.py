"""Calibrated queries of TriAttention: their means, their file, and what the scorer makes of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import build as build_model
from support.policies import POLICIES
from support.run_cli import in_process
from support.trees import GREEDY, Lab
from transformers import AutoModelForCausalLM

from arbor import Solver
from arbor.components import build
from arbor.events import Evicted
from arbor.model.loading import BUILTIN
from arbor.model.runner import ModelRunner
from arbor.papers.related.calibrate_queries import EveryQuery, collect_queries
from arbor.papers.related.query_means import LayerMeans, QueryMeans
from arbor.papers.related.triattention import TriAttention
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.policy import Policy, Protect
from arbor.retention.token_kv import KVSequence, plain_queries
from arbor.tasks.base import Problem
from arbor.trace.read import read_trace

pytestmark = pytest.mark.usefixtures("loaded_once")

HEADS, DIM = 8, 64  # of the built-in model
SHORT = "chains,fewest=2,most=2"


def random_means(layers: int, heads: int, dim: int) -> QueryMeans:
    """Means of some queries, of pairs that all turn."""
    draw = np.random.default_rng(0)
    query = draw.normal(size=(layers, heads, dim)).astype(np.float32)
    length = 2 + draw.random((layers, heads, dim // 2)).astype(np.float32)
    return QueryMeans(tuple(map(LayerMeans, query, length)), 9)


def calibrated(path: Path, means: QueryMeans) -> TriAttention:
    """The scorer with a file of these means."""
    means.save(path)
    return TriAttention(queries=str(path))


def means_of_window(given: KVSequence) -> QueryMeans:
    """The means of the queries that a sequence shows, in the layers that it has."""
    found = []
    for layer in range(max(given.layers) + 1):
        if layer not in given.layers:
            found.append(LayerMeans(np.zeros((1, 2), np.float32), np.zeros((1, 1), np.float32)))
            continue
        plain = plain_queries(given, layer)
        first, second = given.rotation(layer).pairs(plain)
        length = (first**2 + second**2).sqrt().mean(0)
        found.append(LayerMeans(plain.mean(0).numpy(), length.numpy()))
    return QueryMeans(tuple(found), len(given.asked))


# What is collected


@torch.inference_mode()
def own_queries(paths: list[list[int]]) -> list[np.ndarray]:
    """Of each layer, the queries of all tokens of some paths before their encoding, [n, H, D], by
    Hugging Face's forward of each whole path."""
    model = AutoModelForCausalLM.from_pretrained(BUILTIN["sapling"])
    seen: list[list[np.ndarray]] = [[] for _ in model.model.layers]
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.q_proj.register_forward_hook(
            lambda module, given, out, number=number: seen[number].append(out[0].double().numpy())
        )
    for path in paths:
        model(torch.tensor([path]))
    return [np.concatenate(each).reshape(-1, HEADS, DIM) for each in seen]


@pytest.fixture(scope="module")
def collected() -> tuple[tuple[QueryMeans, int], list[list[int]]]:
    """What was collected from three problems, and the tokens of their paths."""
    paths: list[list[int]] = []
    policy = Policy(Pooled(), EveryQuery())
    with Solver(task=SHORT, controller="chain", policy=policy, share="off", seed=3) as solver:

        def problems() -> Iterator[Problem]:
            for problem in itertools.islice(solver.task.problems("train"), 3):
                yield problem
                nodes = solver.engine.tree.nodes
                paths.append([token for node in nodes for token in node.tokens])

        return collect_queries(solver, problems()), paths


def test_the_means_are_those_of_all_queries_of_all_paths(
    collected: tuple[tuple[QueryMeans, int], list[list[int]]],
) -> None:
    (means, problems), paths = collected
    history = own_queries(paths)

    assert (problems, len(means.layers)) == (3, len(history))
    assert means.queries == sum(map(len, paths)) == len(history[0])
    for layer, every in zip(means.layers, history, strict=True):
        pairs = every[..., : DIM // 2] + 1j * every[..., DIM // 2 :]
        length = np.abs(pairs).mean(0)
        assert layer.query == pytest.approx(every.mean(0), abs=1e-4)
        assert layer.length == pytest.approx(length, abs=1e-4)


# The scorer


@pytest.mark.parametrize("name", ["llama", "llama_yarn", "glm"])
def test_means_of_the_window_score_as_the_window_of_an_engine(name: str, tmp_path: Path) -> None:
    lab = Lab(build_model(name), policy="triattention", mode="lossy", rehydrate="off")
    tree = lab.plant(100)
    leaves = lab.sprout([(tree.root, 2)], GREEDY, 9)
    kv = lab.residency.view.offered(leaves, where="anywhere").tokens.kv
    (given,) = kv.sequences
    scorer = calibrated(tmp_path / "queries.npz", means_of_window(given))

    assert given.asked.max() == given.positions.max()
    wanted = kv.scores(TriAttention())
    assert kv.scores(scorer) == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert np.ptp(wanted) > 0.1


@pytest.mark.parametrize("granularity", ["token", "head"])
def test_no_queries_are_kept_where_they_are_calibrated(
    granularity: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scorer = calibrated(tmp_path / "queries.npz", random_means(3, 4, 8))
    policy = dataclasses.replace(
        POLICIES["triattention"],
        scorer=scorer,
        protect=Protect(sinks=2, recent=4),
        granularity=granularity,
    )
    lab = Lab(build_model("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    asked: set[str] = set()
    right = ModelRunner.forward

    def forward(self: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        asked.update(kwargs)
        return right(self, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    tree = lab.plant(24)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, 40)

    assert len(block.tokens) == 40 and any(isinstance(each, Evicted) for each in lab.events)
    assert asked == set() and lab.query_window is None


# Errors


# The commands


@pytest.mark.slow
def test_what_the_command_writes_is_read_by_a_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run = in_process(capsys)

    done = run("calibrate", "queries", "--task", SHORT, "--n", "8", "--seed", "5", "--json")

    assert done.code == 0, done.err
    written = done.document
    means = QueryMeans.load(Path(written["out"]))
    assert (written["out"], written["queries"]) == ("queries.npz", means.queries)
    assert (written["task"], written["seed"], written["problems"]) == (SHORT, 5, 8)
    assert (written["layers"], written["heads"], written["head_dim"]) == (6, HEADS, DIM)

    policy = "triattention,queries=queries.npz"
    options = ("--task", SHORT, "--controller", "chain", "--mode", "lossy", "--budget", "60tok")
    problem = next(iter(build("task", SHORT).problems("train"))).text
    solved = run("solve", problem, *options, "--policy", policy, "--trace", "run.jsonl", "--json")
    assert json.loads(solved.out.splitlines()[-1])["metrics"]["evicted_tokens"] > 0, solved.err
    header = read_trace(Path("run.jsonl")).header
    assert header.config["policy"]["scorer"]["queries"] == "queries.npz"

    wrong = run("solve", problem, *options, "--policy", "triattention,queries=none.npz")
    assert (wrong.code, wrong.out) == (2, "") and "[queries-unreadable] none.npz" in wrong.err
    unwritable = run("calibrate", "queries", "--out", "nowhere/queries.npz")
    assert unwritable.code == 2 and "[output-nowhere]" in unwritable.err
