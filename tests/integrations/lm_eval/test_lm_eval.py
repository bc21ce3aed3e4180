"""lm-eval's model `arbor` gives what its own Hugging Face model gives, on the same weights."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="the extra `lm-eval` is not installed")
import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from support.run_cli import ROOT, environment

from arbor.errors import BudgetInfeasible, UsageError
from arbor.integrations.lm_eval.model import ArborLM
from arbor.model.loading import BUILTIN
from arbor.run.run import Run
from arbor.run.stream import SearchJob
from arbor.run.worker import SharedEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of lm-eval's own dependencies
]

MODEL = str(BUILTIN["sapling"])
LINES = ["4 5 6 10\n", "4 5 6 10\n4 + 5 = 9 (left: 6 9 10)\n", "1 2 3 4\n", "7 * 8 = "]
CHOICES = ["10 - 4 = 6", " 9", "yes", "6 * 5 = 30 (left: 10 30)"]


@pytest.fixture(scope="module")
def both() -> tuple[ArborLM, HFLM]:
    return ArborLM(MODEL), HFLM(pretrained=MODEL, device="cpu", batch_size=4)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=number)
        for number, each in enumerate(arguments)
    ]


def test_likelihoods_are_those_of_hf(both: tuple[ArborLM, HFLM]) -> None:
    asked = requests(
        "loglikelihood",
        *((line, choice) for line in [*LINES, ""] for choice in CHOICES),
        ("4 5 6 10 ", "9"),  # the space belongs to the continuation
        ("7 8 9 10\n" * 800, "10 - 9 = 1"),  # cut on the left
    )

    arbor, hf = (model.loglikelihood(asked) for model in both)

    assert [value for value, _ in arbor] == pytest.approx([value for value, _ in hf], abs=1e-3)
    assert [greedy for _, greedy in arbor] == [greedy for _, greedy in hf]


def test_rolling_likelihoods_are_those_of_hf() -> None:
    asked = requests("loglikelihood_rolling", *((line * 9,) for line in LINES))
    settings: dict[str, Any] = {"pretrained": MODEL, "max_length": 24, "device": "cpu"}

    arbor, hf = (model(**settings).loglikelihood_rolling(asked) for model in (ArborLM, HFLM))

    assert arbor == pytest.approx(hf, rel=1e-4)


@pytest.mark.parametrize("until", [["\n"], ["(left", ")"], []])
def test_continuations_are_those_of_hf(both: tuple[ArborLM, HFLM], until: list[str]) -> None:
    asked = requests(
        "generate_until", *((line, {"until": until, "max_gen_toks": 24}) for line in LINES)
    )

    arbor, hf = (model.generate_until(asked) for model in both)

    assert arbor == hf


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A copy of the model whose files a test may change."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


@pytest.mark.parametrize(
    "settings", [{"add_bos_token": True}, {"prefix_token_id": 5, "add_bos_token": True}]
)
def test_a_first_token_is_added_where_hf_adds_it(changed: Path, settings: dict[str, Any]) -> None:
    tokenizer = json.loads((changed / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["post_processor"] = None
    (changed / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    lines = [*LINES, *(f"<bos>{line}" for line in LINES)]
    scored = requests("loglikelihood", *((line, CHOICES[0]) for line in lines))
    continued = requests("generate_until", *((line, {"max_gen_toks": 8}) for line in lines))
    both = ArborLM(str(changed), **settings), HFLM(str(changed), device="cpu", **settings)

    (arbor, written), (hf, wanted) = (
        (model.loglikelihood(scored), model.generate_until(continued)) for model in both
    )

    assert [value for value, _ in arbor] == pytest.approx([value for value, _ in hf], abs=1e-3)
    assert written == wanted


@pytest.mark.parametrize(
    ("configured", "most"), [({}, 50), ({"top_k": 2}, 2), ({"do_sample": True, "top_p": 1e-9}, 1)]
)
def test_samples_are_cut_as_those_of_hf(
    changed: Path, configured: dict[str, Any], most: int
) -> None:
    (changed / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 2, **configured}), encoding="utf-8"
    )
    asked = requests(
        "generate_until",
        *(("4", {"max_gen_toks": 1, "do_sample": True, "temperature": 1e4}) for _ in range(400)),
    )

    arbor, hf = (
        model.generate_until(asked)
        for model in (ArborLM(str(changed)), HFLM(str(changed), device="cpu", batch_size=400))
    )

    assert len(set(arbor)) == pytest.approx(len(set(hf)), rel=0.05) and len(set(arbor)) <= most


def test_equal_requests_have_samples_of_their_own(both: tuple[ArborLM, HFLM]) -> None:
    drawn = {"max_gen_toks": 8, "do_sample": True, "temperature": 10.0}
    alone = both[0].generate_until(requests("generate_until", (LINES[0], drawn)))
    asked = requests("generate_until", *((line, drawn) for line in (*LINES, *LINES, *LINES)))

    texts = both[0].generate_until(asked)

    assert len(set(texts)) == len(texts) and texts[0] == alone[0]
    assert both[0].generate_until(asked) == texts


def test_none_stands_for_what_is_not_given(both: tuple[ArborLM, HFLM]) -> None:
    given = {"max_gen_toks": 8, "do_sample": True}
    nothing = {"temperature": None, "top_k": None, "max_tokens": None, "until": None}

    left_out, none = (
        both[0].generate_until(requests("generate_until", (LINES[0], arguments)))
        for arguments in (given, given | nothing)
    )

    assert left_out == none


def test_the_numbers_of_tasks_are_those_of_hf(tmp_path: Path, both: tuple[ArborLM, HFLM]) -> None:
    rows = [
        {"line": line, "choices": CHOICES, "gold": number % 4, "next": CHOICES[number % 4]}
        for number, line in enumerate(LINES * 2)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "doc_to_text": "{{line}}",
    }
    tasks = [
        common
        | {
            "task": "choose",
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "gold",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        common
        | {
            "task": "write",
            "output_type": "generate_until",
            "doc_to_target": "next",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16},
            "metric_list": [{"metric": "exact_match"}],
        },
        common
        | {
            "task": "read",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{line}}{{next}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
    ]

    arbor, hf = (
        lm_eval.simple_evaluate(model=model, tasks=tasks, bootstrap_iters=0)["results"]
        for model in both
    )

    for task in ("choose", "write", "read"):
        names = [name for name, value in hf[task].items() if isinstance(value, float)]
        assert names
        for name in names:
            assert arbor[task][name] == pytest.approx(hf[task][name], rel=1e-6), (task, name)


def test_a_search_writes_the_best_of_several_continuations(both: tuple[ArborLM, HFLM]) -> None:
    searching = ArborLM(MODEL, controller="best-of-n;samples=4", max_gen_toks=40, step_tokens=20)
    asked = requests("generate_until", *((line, {"until": [" ="]}) for line in LINES))

    found = searching.generate_until(asked)
    plain = both[0].generate_until(asked)

    assert len(found) == len(LINES) and found != plain
    assert not any(" =" in text for text in found)
    assert found == searching.generate_until(asked)


@pytest.mark.parametrize("verifier", ["self", "vote;choices=3"])
def test_a_long_context_leaves_room_for_a_continuation_and_the_question_about_it(
    verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = ArborLM(MODEL, controller="beam", verifier=verifier, max_expansions=3, max_length=400)
    begun: list[Run] = []
    begin = SharedEngine.begin

    def noted(shared: SharedEngine, run: Run) -> SearchJob:
        begun.append(run)
        return begin(shared, run)

    monkeypatch.setattr(SharedEngine, "begin", noted)

    judged.generate_until(requests("generate_until", ("7 8 9 10\n" * 99, {"max_gen_toks": 24})))

    (run,) = begun
    assert len(run.prompt) + 24 + run.plan.question_tokens == 400
    with pytest.raises(UsageError, match="395 tokens to generate and to ask about") as refused:
        judged.generate_until(requests("generate_until", (LINES[0], {"max_gen_toks": 395})))
    (most,) = re.findall("between 1 and ([0-9]+)", str(refused.value))
    judged.generate_until(requests("generate_until", (LINES[0], {"max_gen_toks": int(most)})))


def test_what_arbor_does_not_have_is_refused(both: tuple[ArborLM, HFLM]) -> None:
    for arguments, words in (
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"max_gen_toks": 10**6}, "context"),
        ({"max_gen_toks": 0}, "0 tokens to generate"),
        ({"num_beams": 4}, "num_beams=4"),
        ({"num_return_sequences": 2}, "num_return_sequences=2"),
        ({"max_length": 20}, "max_length=20"),
    ):
        with pytest.raises(UsageError, match=words):
            both[0].generate_until(requests("generate_until", ("x", arguments)))
    one = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "max_gen_toks": 1}
    both[0].generate_until(requests("generate_until", ("x", one)))


def test_an_error_leaves_no_continuation_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    model, begun = ArborLM(MODEL, kv_tokens=80), []
    begin = SharedEngine.begin

    def noted(shared: SharedEngine, run: Any) -> SearchJob:
        begun.append(begin(shared, run))
        return begun[-1]

    def unreadable(job: SearchJob) -> str:
        raise RuntimeError("no text")

    monkeypatch.setattr(SharedEngine, "begin", noted)
    fitting = [(line, {"max_gen_toks": 40}) for line in LINES]
    with pytest.raises(BudgetInfeasible):
        model.generate_until(requests("generate_until", *fitting, ("4 5\n" * 40, {})))
    assert begun == []

    monkeypatch.setattr(model, "_text", unreadable)
    with pytest.raises(RuntimeError, match="no text"):
        model.generate_until(requests("generate_until", *fitting))
    assert len(begun) == len(LINES) and all(job.abandoned or job.ended for job in begun)


def test_the_command_evaluates_arbor(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"line": line, "next": " 9"}) + "\n" for line in LINES), encoding="utf-8"
    )
    (tmp_path / "write.yaml").write_text(
        "task: write_nine\ndataset_path: json\ndataset_kwargs:\n  data_files: {test: data.jsonl}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: '{{line}}'\n"
        "doc_to_target: '{{next}}'\ngeneration_kwargs: {until: ['='], max_gen_toks: 8}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n",
        encoding="utf-8",
    )
    words = ["--model", "arbor", "--model_args", f"pretrained={MODEL},controller=chain;samples=2"]
    words += ["--tasks", "write_nine", "--include_path", ".", "--output_path", "out"]

    done = subprocess.run(
        [sys.executable, "-m", "arbor.integrations.lm_eval", *words],
        cwd=tmp_path,
        env=environment(
            PYTHONPATH=":".join((str(ROOT), *sys.path)),
            HF_HOME=str(tmp_path / "home"),
            HF_HUB_OFFLINE="1",
        ),
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert "write_nine" in done.stdout and "exact_match" in done.stdout


def test_lm_evals_own_models_stay_known() -> None:
    program = (
        "import arbor.integrations.lm_eval.model\n"
        "from lm_eval.api.registry import get_model\n"
        "print(get_model('dummy').__name__, get_model('arbor').__name__)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(PYTHONPATH=":".join((str(ROOT), *sys.path))),
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.split() == ["DummyLM", "ArborLM"]
