"""Questions in turns of their own: what the chat template writes, and what the model answers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.reward_models import byte_tokenizer, spaced_tokenizer
from support.slow_cases import every

from arbor import Solver
from arbor.controllers.tot import ToT
from arbor.events import Event, Verified
from arbor.run import questions
from arbor.run.conversation import conversation_tokens
from arbor.run.questions import QuestionTurn, Words, question_turn
from arbor.tasks.base import Problem
from arbor.tasks.reasoning import Reasoning
from arbor.tree import Node
from arbor.verifiers.self_eval import verdict_tokens

QUESTION, REASONED = "Is it right? Answer yes or no.", "3 + 4 = 7.\n\nSo it is 7."
ASKED = {"role": "user", "content": "What is 3 + 4?"}
JUDGED = [ASKED, {"role": "assistant", "content": REASONED}, {"role": "user", "content": QUESTION}]

PROBLEM = Reasoning().parse("What is 3 + 4?")

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nHelp."
    "<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# trims what is said; the role is in capitals
TRIMS = (
    "<s>{% for m in messages %}[{{ m.role | upper }}]\n{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[ASSISTANT]\n{% endif %}"
)
# as Llama 2 writes: the end of a turn is a space and the end token
SPACED = (
    "{% for m in messages %}{% if m.role == 'user' %}[I] {{ m.content }} [/I]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
ALONE = (
    "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}"
    "[U] {{ messages[0].content }} [A] "
)
THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
FORGETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[U] {{ m.content }}{% endif %}{% endfor %}"
)


def made(template: str | None, spaced: bool = False) -> Any:
    """A small tokenizer with this template."""
    tokenizer = (
        spaced_tokenizer() if spaced else byte_tokenizer("<|im_start|>", "<|im_end|>", "<s>")
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [made(CHATML), made(TRIMS), made(SPACED), made(CHATML, spaced=True), made(SPACED, spaced=True)],
    ids=["chatml", "trims", "spaced", "chatml-sentencepiece", "spaced-sentencepiece"],
)
def test_path_and_turn_are_the_tokens_of_the_whole_conversation(tokenizer: Any) -> None:
    turn = question_turn(tokenizer, Reasoning(), PROBLEM)

    assert turn is not None
    prompt = conversation_tokens(tokenizer, [ASKED])
    whole = conversation_tokens(tokenizer, JUDGED)
    asked = turn.encode(QUESTION)
    assert whole[: len(prompt)] == prompt
    assert whole[-len(asked) :] == asked
    assert tokenizer.decode(whole[: -len(asked)]).endswith(REASONED.rstrip())


@pytest.mark.parametrize("template", [ALONE, THINKS, FORGETS, "{{ nothing.at_all }}"])
def test_a_template_without_a_further_turn_leaves_the_question_in_the_text_and_says_so(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert question_turn(made(template), Reasoning(), PROBLEM) is None
    assert "judge within its own text" in caplog.text


# A real model


@pytest.mark.parametrize("chat", every(2, ["auto", "off"]))
def test_a_real_model_is_judged_by_its_answer_to_the_whole_rendered_text(
    smollm2: Path, chat: Literal["auto", "off"]
) -> None:
    """Every value, asked after the KV of the path, is that of one pass over all of the text."""
    task = Reasoning(chat=chat, max_tokens=24, max_depth=2, stop=("\n",))
    problem = task.parse("What is 12 * 3?")
    seen: list[Verified] = []

    def listen(event: Event) -> None:
        if isinstance(event, Verified):
            seen.append(event)

    settings = {"controller": ToT(beam=1, width=2), "task": task, "listeners": [listen]}
    with Solver(smollm2, dtype="float32", device="cpu", **settings) as solver:
        tokenizer = solver.tokenizer
        question = task.question(problem, ())
        asked = question if question.turn is None or chat == "off" else question.turn
        verdicts = {
            tokenizer.encode(word, add_special_tokens=False)[0]: worth
            for word, worth in asked.values.items()
        }
        assert len(set(verdicts.values())) > 1
        solver.solve(problem)
        tree = solver.engine.tree
        first = verdict_tokens(question, words(tokenizer, task, problem))
        assert solver.plan(problem).question_tokens == len(first.asked)
        texts = [
            _asked(tokenizer, task, problem, tree[node]) for event in seen for node in event.nodes
        ]
        pairs = [(text, [verdict]) for text in texts for verdict in verdicts]
        scores = [found.total for found in solver.logprobs(pairs) if found is not None]

    assert len(texts) == 4
    shares = torch.softmax(torch.tensor(scores, dtype=torch.float64).view(4, -1), 1)
    worths = torch.tensor(list(verdicts.values()), dtype=torch.float64)
    values = [value for event in seen for value in event.values]
    assert values == pytest.approx((shares @ worths).tolist(), abs=1e-4)


def words(tokenizer: Any, task: Reasoning, problem: Problem) -> Words:
    """The encoder of a search's plan."""
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return Words(encode, question_turn(tokenizer, task, problem))


def _asked(tokenizer: Any, task: Reasoning, problem: Problem, node: Node) -> list[int]:
    """Token ids of a path, and of the question about it as the template writes it."""
    question, said = task.question(problem, node.thoughts), "".join(node.thoughts)
    path = [token for block in node.path for token in block.tokens]
    if task.chat == "off" or question.turn is None:
        return path + list(tokenizer.encode(question.text))
    messages = [
        {"role": "user", "content": task.prompt(problem)},
        {"role": "assistant", "content": said},
        {"role": "user", "content": question.turn.text},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if path[-1] == tokenizer.eos_token_id:
        path.pop()
    assert tokenizer.decode(path).endswith(said), "what follows is all that is missing"
    return path + list(tokenizer.encode(text[text.rindex(said) + len(said) :]))


def test_a_turn_is_encoded_once_for_all_thoughts_that_it_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[str] = []

    def encode(tokenizer: object, text: str, **_: bool) -> list[int]:
        encoded.append(text)
        return list(text.encode())

    monkeypatch.setattr(questions, "encode_marked", encode)
    monkeypatch.setattr(questions, "MOST_KNOWN", 2)
    turn = QuestionTurn(made(None), "a", "<", ">")
    first = turn.encode("b")
    first.append(0)  # the caller's own

    assert turn.encode(" b ") == list(b"<b>")
    assert turn.encode("b", "c") == list(b"<b>c")
    assert encoded == ["a", "a<b>", "a", "a<b>c"]
    assert [bytes(turn.encode(each)) for each in "def"] == [b"<d>", b"<e>", b"<f>"]
    assert len(turn.known) <= 2
