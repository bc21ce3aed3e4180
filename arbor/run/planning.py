"""Planning: a prompt as token ids, and its memory at a budget; reads no weights."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from arbor.budget import Budget, Footprint, Plan
from arbor.errors import ArborError, BudgetInfeasible, InputError, ModelError, UsageError
from arbor.model.control_tokens import control_tokens, encode_marked
from arbor.model.names import BYTES_OF
from arbor.retention.base import CalibratedScorer
from arbor.run.conversation import conversation_tokens
from arbor.run.limits import check_count
from arbor.run.plugin_answers import (
    checked_task,
    most_blocks,
    most_proposals,
    proposing,
    question_bound,
    unchecked,
)
from arbor.run.questions import Words, in_conversation, question_turn
from arbor.support.texts import one_line, refuse_surrogates
from arbor.tasks.base import (
    BlockLimits,
    BoundedQuestions,
    Converses,
    GivesTurns,
    Problem,
    Proposes,
    PutsInWords,
    Task,
)
from arbor.verifiers.base import ChecksQuestions, Encoder, PlansQuestions, parts_of
from arbor.verifiers.self_eval import asked_tokens

if TYPE_CHECKING:
    from arbor.run.setup import Setup


def parse_problem(task: Task, problem: str | Problem) -> Problem:
    """A problem as a user gives it, parsed.

    A `Problem` made by hand has no data: its text is parsed too.

    Raises:
        UsageError: neither a text nor a `Problem`.
        InputError: the task cannot read it, or it has half of a character.
    """
    if isinstance(problem, Problem):
        if problem.data:
            return problem
        return replace(problem, data=parse_problem(task, problem.text).data)
    if not isinstance(problem, str):
        raise UsageError(
            "problem-type",
            f"a problem is a text, or a Problem, not {type(problem).__name__}: {problem!r:.60}.",
            f'As in solve("{task.example}").',
        )
    refuse_surrogates(problem, "the problem")
    return task.parse(problem)


LEAST_WORDS = 2048  # entries of the vocabulary of a model that reads words


def fitted(task: Task, tokenizer: Any) -> Task:
    """The task with the prompts that a model reads best: its own for a model trained on it, which
    knows few words, else those in words (`PutsInWords`)."""
    own = unchecked(task)
    return own.in_words() if isinstance(own, PutsInWords) and reads_words(tokenizer) else task


def reads_words(tokenizer: Any) -> bool:
    """Whether a model has the vocabulary of one that reads words."""
    return len(tokenizer) >= LEAST_WORDS


def prompt_of(task: Task, problem: Problem, tokenizer: Any) -> str:
    """The text of a prompt, for readers: the whole, or the contents of its messages."""
    own = unchecked(task)
    if isinstance(own, GivesTurns) and in_conversation(tokenizer, own):
        return "\n\n".join(each["content"] for each in own.turns(problem))
    return task.prompt(problem)


def encode_problem(tokenizer: Any, task: Task, problem: Problem) -> list[int]:
    """Token ids of the prompt of a problem; see `encode_prompt`."""
    own = unchecked(task)
    if isinstance(own, GivesTurns) and in_conversation(tokenizer, own):
        return encode_prompt(tokenizer, own.turns(problem), task)
    return encode_prompt(tokenizer, task.prompt(problem), task, problem.text)


def encode_prompt(
    tokenizer: Any,
    prompt: str | Sequence[Mapping[str, str]],
    task: Task | None = None,
    problem: str = "",
) -> list[int]:
    """Token ids of a prompt: one user message where the tokenizer has a chat template.

    Control tokens named in the problem are text; so is every one that a message names.

    Args:
        tokenizer: of the model.
        prompt: the text, or messages for the chat template.
        task: a system message, and whether the chat template is used, are its own (`Converses`).
        problem: the part of the prompt that a user wrote.

    Raises:
        InputError: the prompt has half of a character.
        UsageError: the chat template refuses the messages, or cannot be used.
    """
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    for each in turns:
        refuse_surrogates(each["content"], "the prompt")
    own = None if task is None else unchecked(task)
    system = own.system_message if isinstance(own, Converses) else ""
    refuse_surrogates(system, "the system message")
    if not isinstance(prompt, str) or in_conversation(tokenizer, own):
        first = [{"role": "system", "content": system}] if system else []
        messages: list[Mapping[str, str]] = [*first, *turns]
        try:
            return conversation_tokens(tokenizer, messages)
        except ArborError:
            raise
        except Exception as error:  # the template's own
            what = "a system message" if system else "a user's message"
            raise UsageError(
                "chat-template",
                f"the model's chat template refuses {what}: {one_line(str(error))}.",
                "Put its text into the prompt (--set template=FILE), or use --set chat=off."
                if system
                else "Use --set chat=off.",
            ) from error
    prompt = control_tokens(tokenizer).mark_in(prompt, problem)
    return encode_marked(tokenizer, f"{system}\n\n{prompt}" if system else prompt)


def plan_search(setup: Setup, problem: Problem, prompt_tokens: int, budget: Budget) -> Plan:
    """The memory of one problem at a budget.

    Raises:
        ModelError: the model is not supported.
        InputError: the longest path would not fit the model's context.
        BudgetInfeasible: the budget is too small; names the smallest that works, which is full
            retention for a policy that evicts nothing.
        UsageError: the verifier cannot read verdicts from this model, the policy's calibrated
            queries are of another one, or it names layers that this one lacks.
    """
    files, boundary = setup.checkpoint.read(), setup.boundary
    info = files.info
    if not info.supported:
        raise ModelError("arch-unsupported", f"{info.id}: {info.reason}", "See 'arbor info MODEL'.")
    scorer = setup.policy.scorer
    if isinstance(scorer, CalibratedScorer):
        scorer.check_model(info.layers, info.num_qo_heads, info.head_dim)
    setup.policy.observation.layers_of(info.layers)
    words = words_of(setup, problem)
    for part in parts_of(setup.verifier):
        if isinstance(part, ChecksQuestions):
            part.check(checked_task(setup.task), problem, words)
    shape_of = partial(footprint, setup, problem, words, prompt_tokens)
    shape = shape_of(boundary)
    if shape.path_tokens > info.context:
        searched = shape.path_tokens - prompt_tokens

        def resized(
            max_depth: int = boundary.max_depth,
            step_tokens: int = boundary.max_tokens,
            path_limit: int | None = boundary.path_tokens,
        ) -> Footprint:
            limits = replace(boundary, max_depth=max_depth, max_tokens=step_tokens)
            return shape_of(replace(limits, path_tokens=path_limit))

        levers = shape.levers(info.context, resized)
        if searched < info.context:
            levers.insert(0, "Shorten the problem")
        elif levers:
            levers[0] = f"Use {levers[0]}"
        else:
            levers = ["Take a model of a longer context"]
        raise InputError(
            "problem-too-long",
            f"{prompt_tokens:,} tokens; the model's context is {info.context:,} and the search needs "
            f"{searched:,} more.",
            _joined(levers, info.id, setup.task),
            tokens=prompt_tokens,
            context=info.context,
        )
    number = info.kv_bytes_per_token, BYTES_OF[info.dtype]
    host, disk = setup.tier_tokens(*number)
    if shape.staging_tokens and host < shape.path_tokens:
        raise UsageError(
            "staging",
            f"host has room for {host:,} tokens, and the longest path may have "
            f"{shape.path_tokens:,}: with staging all of it may be there.",
            f"Give host={shape.path_tokens}tok or more.",
        )
    if not setup.policy.keeps_all:
        plan = budget.plan(shape, info.kv_bytes_per_token)
        plan = replace(plan, host_tokens=host, disk_tokens=disk, kv_dtype=info.kv_dtype)
        if setup.host_bits is None:
            return plan
        packed = setup.host_token_bytes(*number)
        return replace(plan, host_bits=setup.host_bits, host_token_bytes=packed)
    slots = budget.tokens(shape.full_tokens, info.kv_bytes_per_token)
    if slots < shape.full_tokens:
        raise BudgetInfeasible(
            shape.full_tokens,
            slots,
            f"the policy '{setup.policy.name}', which evicts nothing,",
            "Use --budget full, or another --policy.",
        )
    plan = budget.plan(shape, info.kv_bytes_per_token)
    whole = plan.full_tokens
    return replace(plan, smallest_tokens=whole, enough_tokens=whole, kv_dtype=info.kv_dtype)


def _joined(levers: list[str], model: str, task: Task) -> str:
    """What would work for a path longer than a model's context."""
    said = f"{', or '.join(levers)}."
    if model.startswith("builtin:") and isinstance(unchecked(task), Converses):
        return f"Name another model, which knows problems in words: --model NAME. {said}"
    return said


def words_of(setup: Setup, problem: Problem) -> Words:
    """Token ids of the questions about a problem to the model of a search."""
    tokenizer = setup.checkpoint.read().tokenizer
    turn = question_turn(tokenizer, unchecked(setup.task), problem)
    return Words(partial(tokenizer.encode, add_special_tokens=False), turn)


def footprint(
    setup: Setup, problem: Problem, words: Words, prompt_tokens: int, limits: BlockLimits
) -> Footprint:
    """The KV that a search with these limits can need."""
    protect, able = setup.policy.protect, proposing(setup.task)
    proposals = most_proposals(setup.controller, limits.max_depth)
    assert able is not None or not proposals, "checked when the solver was made"
    listed = proposal_tokens(able, problem, words) if able is not None and proposals else 0
    judged, first = (
        question_tokens(setup, problem, words, each) if setup.verifier.needs_model else 0
        for each in (limits, replace(limits, max_depth=1))
    )
    return Footprint(
        prompt_tokens,
        limits.max_tokens,
        limits.max_depth,
        most_blocks(setup.controller, limits.max_depth),
        max(judged, listed),
        protect.sinks + protect.recent if setup.mode == "lossy" else None,
        proposals,
        setup.staging_tokens(setup.checkpoint.read().info.kv_bytes_per_token),
        limits.path_tokens,
        max(first, listed),
    )


def path_and_question(setup: Setup, problem: Problem) -> int:
    """Positions that the longest path of a search and a question about it take after a prompt."""
    return footprint(setup, problem, words_of(setup, problem), 0, setup.boundary).path_tokens


def path_within(setup: Setup, problem: Problem, positions: int) -> int:
    """Tokens of the longest path of a search that fits, with a question about it, into the
    positions after a prompt: at most those of the setup's limits; 0 where none fits."""
    words, limits = words_of(setup, problem), setup.boundary

    def taken(size: int) -> int:
        limited = replace(limits, path_tokens=size)
        return footprint(setup, problem, words, 0, limited).path_tokens

    sizes = range(1, min(limits.longest_path, positions) + 1)
    return bisect_right(sizes, positions, key=taken)


def question_tokens(setup: Setup, problem: Problem, words: Words, limits: BlockLimits) -> int:
    """Tokens of a question to the model in a search with these limits that the plan counts.

    They are those of the question at no thoughts, and at least `max_question_tokens` of a task that
    declares it, and the tokens that all verdicts begin with; or the bound of a verifier that has
    questions of its own.

    Raises:
        UsageError: the declared number is not a whole number of at least 1.
    """
    task = setup.task
    asking = [part for part in parts_of(setup.verifier) if part.needs_model]
    bounds = [
        question_bound(part, checked_task(task), problem, limits, words)
        for part in asking
        if isinstance(part, PlansQuestions)
    ]
    known = [most for most in bounds if most is not None]
    if known and len(known) == len(asking):
        return max(known)
    question = checked_task(task).question(problem, ())
    asked, text = asked_tokens(question, words), len(words.encode(question.text))
    declared = None
    parts = unchecked(task)
    if isinstance(parts, BoundedQuestions):
        declared = check_count("max_question_tokens", parts.max_question_tokens)
    around = asked - text  # by the turn, and by what all verdicts begin with
    return max(asked, (declared or 0) + around, max(known, default=0))


def proposal_tokens(task: Proposes, problem: Problem, encoder: Encoder) -> int:
    """Tokens of a question for proposals and its longest completion, at no thoughts."""
    first = task.proposal(problem, ())
    return len(encoder.encode(first.text)) + first.max_tokens
