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

import arbor.model.weights
from arbor import Solver
from arbor.components import build, spec_of
from arbor.errors import UsageError
from arbor.events import Evicted
from arbor.measure.replay import replay
from arbor.model.loading import BUILTIN
from arbor.model.runner import ModelRunner
from arbor.papers.related.calibrate_queries import CollectedQueries, EveryQuery, collect_queries
from arbor.papers.related.query_means import LayerMeans, QueryMeans
from arbor.papers.related.triattention import TriAttention
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.policy import Policy, Protect
from arbor.retention.token_kv import KVSequence, plain_queries
from arbor.server.search_changes import _free_settings
from arbor.tasks.base import Problem
from arbor.testing import random_kv
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
def collected() -> tuple[CollectedQueries, list[list[int]]]:
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
    collected: tuple[CollectedQueries, list[list[int]]],
) -> None:
    found, paths = collected
    history = own_queries(paths)

    assert (found.problems, len(found.means.layers)) == (3, len(history))
    assert found.means.queries == sum(map(len, paths)) == len(history[0])
    for layer, every, concentration in zip(
        found.means.layers, history, found.concentration, strict=True
    ):
        pairs = every[..., : DIM // 2] + 1j * every[..., DIM // 2 :]
        length = np.abs(pairs).mean(0)
        assert layer.query == pytest.approx(every.mean(0), abs=1e-4)
        assert layer.length == pytest.approx(length, abs=1e-4)
        assert concentration == pytest.approx(np.abs(pairs.mean(0)).sum() / length.sum(), abs=1e-4)
        assert 0 < concentration < 1


def test_of_more_queries_than_the_window_holds_the_last_ones_count() -> None:
    policy = Policy(Pooled(), EveryQuery(window=2))
    with Solver(task=SHORT, controller="chain", policy=policy, share="off") as solver:
        found = collect_queries(solver, itertools.islice(solver.task.problems("train"), 1))
        blocks = len(solver.engine.tree.nodes)
        tokens = solver.engine.tree.nodes[-1].end
        assert solver.listeners == ()
    assert 2 <= found.means.queries <= 2 * blocks < tokens


def test_a_file_holds_what_was_saved(tmp_path: Path) -> None:
    means = random_means(2, 4, 8)
    path = tmp_path / "queries.npz"

    means.save(path, model="some/model", task="chains", seed=3)

    again = QueryMeans.load(path)
    assert (again.queries, again.path) == (9, str(path))
    for mine, other in zip(means.layers, again.layers, strict=True):
        assert (mine.query == other.query).all() and (mine.length == other.length).all()
    with np.load(path) as archive:
        about = json.loads(str(archive["about"]))
    assert about["provenance"] == {"model": "some/model", "task": "chains", "seed": 3}


# The scorer


@pytest.mark.parametrize("seed", range(3))
def test_means_of_the_window_score_as_the_window(seed: int, tmp_path: Path) -> None:
    given = random_kv(seed, 20).sequences[0]
    # the last query is that of the last token on the device
    given = dataclasses.replace(given, asked=given.asked - given.asked.max() + len(given) - 1)
    scorer = calibrated(tmp_path / "queries.npz", means_of_window(given))

    for layer in given.layers:
        wanted = TriAttention().of_heads(given, layer)
        assert torch.allclose(scorer.of_heads(given, layer), wanted, rtol=1e-5, atol=1e-5)
    blind = dataclasses.replace(given, asked=np.empty(0, np.int64))
    assert torch.equal(scorer.of(blind, 3), scorer.of(given, 3))


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


def test_the_setting_is_a_text_and_part_of_a_trace_only_where_it_is_set() -> None:
    policy = build("policy", "triattention,queries=my,means.npz,window=7")
    assert (policy.scorer.queries, policy.scorer.window) == ("my,means.npz", 7)
    assert spec_of(policy)["scorer"]["queries"] == "my,means.npz"
    assert "queries" not in spec_of(POLICIES["triattention"])["scorer"]


def test_requests_to_the_server_may_not_name_the_file() -> None:
    assert _free_settings(TriAttention) == {"farthest", "window"}


# Errors


def damaged(path: Path, kind: str) -> None:
    random_means(2, 4, 8).save(path)
    if kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "missing":
        path.unlink()
    elif kind == "text":
        path.write_text("no archive", encoding="utf-8")
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    elif kind == "array":
        with path.open("wb") as stream:
            np.save(stream, np.zeros(3))
    else:
        with np.load(path) as archive:
            members = dict(archive)
        if kind == "schema":
            members["about"] = np.array('{"schema": "arbor.queries/9", "queries": 1}')
        elif kind == "shapes":
            members["length_1"] = members["length_1"][:2]
        elif kind == "numbers":
            members["query_0"][0, 0] = np.nan
        elif kind == "layers":
            members = {"about": members["about"]}
        np.savez(path, **members)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"queries\.npz cannot be read: No such file"),
        ("folder", "cannot be read: Is a directory"),
        ("text", "holds no means of queries"),
        ("cut", "holds no means of queries"),
        ("array", "holds no means of queries"),
        ("schema", "its schema is arbor.queries/9, not arbor.queries/1"),
        ("shapes", r"layer 1 has the shapes \(4, 8\) and \(2, 4\)"),
        ("numbers", "layer 0 has a number that is not finite"),
        ("layers", "it has no layers"),
    ],
)
def test_an_unreadable_file_is_refused_when_the_solver_is_made(
    kind: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "queries.npz"
    damaged(path, kind)

    with pytest.raises(UsageError, match=message) as caught:
        Solver(policy=f"triattention,queries={path}")

    assert caught.value.code == "queries-unreadable"
    assert "arbor calibrate queries" in caught.value.hint


def test_queries_of_another_model_are_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scorer = calibrated(tmp_path / "queries.npz", random_means(3, 4, 8))
    monkeypatch.setattr(arbor.model.weights, "load_weights", None)

    with (
        Solver(policy=Policy(Pooled(), scorer), mode="lossy") as solver,
        pytest.raises(UsageError) as caught,
    ):
        solver.solve("4 5 6 10")

    assert caught.value.code == "queries-model"
    assert "3 layers, the first with 4 query heads of 8 numbers" in caught.value.message
    assert f"6 layers, the first with {HEADS} of {DIM}" in caught.value.message


@pytest.mark.parametrize(
    ("means", "message"),
    [
        (random_means(2, 4, 8), r"they have 2 layers; .* in layer 2"),
        (random_means(3, 8, 8), r"8 query heads of 8 numbers, 4 pairs .* has 4 query heads of 8"),
        (random_means(3, 4, 16), "4 query heads of 16 numbers"),
    ],
)
def test_a_layer_of_other_sizes_is_refused(means: QueryMeans, message: str, tmp_path: Path) -> None:
    scorer = calibrated(tmp_path / "queries.npz", means)
    policy = dataclasses.replace(POLICIES["triattention"], scorer=scorer)
    lab = Lab(build_model("llama"), policy=policy, mode="lossy", rehydrate="off")
    tree = lab.plant(24)

    with pytest.raises(UsageError, match=message) as caught:
        lab.sprout([(tree.root, 1)], GREEDY, 40)

    assert caught.value.code == "queries-model"


# The commands


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


def test_a_replay_needs_no_file(tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    with Solver(controller="beam", verifier="exact", max_expansions=2) as solver:
        solver.solve("4 5 6 10", trace=path)
        found = [
            replay(read_trace(path), solver.tokenizer, policy=policy, slots=200)
            for policy in ("triattention", "triattention,queries=none.npz")
        ]
    assert found[0].tokens_recomputed == found[1].tokens_recomputed
