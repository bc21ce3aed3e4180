"""Trains Sapling, the embedded model: data, tokenizer, training, export; one command from nothing
to the files.

    python scripts/train_sapling.py --minutes 80 --work build/sapling --out arbor/sapling
    # go on after an interruption
    python scripts/train_sapling.py --resume --minutes 80 --work build/sapling
    # warm start from saved weights
    python scripts/train_sapling.py --init arbor/sapling --minutes 30
    # the last checkpoint as files
    python scripts/train_sapling.py --export-only --work build/sapling

One training document is a *tree*: a prompt, several thoughts per state, and after each state the
verifier's question with its exact verdict, exactly as a search sees them. A token attends to its
ancestors only, and its position is its depth in tokens, so one forward pass trains the policy and
the judge on many branches of one problem.

    segment     a run of tokens with a parent segment; children may share a parent
    target      (position whose hidden state predicts, token, weight); the first token of every
                child is predicted from the last token of its parent, so one position can have
                several targets
    row         documents packed into [T] tokens, each with the place of its segment in the tree,
                from which `visible` makes the mask

Optimiser: Muon (K. Jordan, 2024: orthogonalised momentum) for the matrices of the layers, AdamW for
embedding and norms. The learning rate follows the share of the time budget that is used up, so the
run ends when it should. Word problems start with two steps and grow by one tenth of the way to 16
whenever the share of right tokens passes `MASTERED`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Full
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arbor.tasks.chains import Chains, generate
from arbor.tasks.countdown import Countdown, ParsedStep, can_reach, legal_steps
from arbor.tasks.game24 import LARGEST_CARD, TARGET, Game24
from arbor.tasks.recall import Recall
from arbor.tasks.splits import split_of

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
KINDS = ("choice", "result", "judge", "chains", "chains-judge", "recall", "facts")
LARGEST_RESULT = 200
MASTERED = 0.96  # share of right tokens at which word problems get longer, first of all in looking facts up
JUDGE_WEIGHT = 3.0  # verdicts are few among the tokens, and search stands on them
EMBEDDING = 0.1  # standard deviation; as large as what a head of the first layer adds
TREE = 256  # tokens in a row of countdown trees
SHORT, MIDDLE = 128, 256  # tokens in a row of word problems, until they are long

# Every alternative ends at a newline or before it: a text that ends in a newline is a prefix in
# tokens as well.
PIECES = "|".join(
    (
        r"\)\n",
        r" \(left:",
        r" [-+*/=]",
        r" [A-Z][a-z]* (?:has|is|=)",
        r" [A-Z]:",
        r" (?:times )?as many as",
        r" (?:more|fewer) than",
        r" ?[A-Za-z]+",
        r" ?[0-9]",
        r"\n",
        r" ",
        r"[^A-Za-z0-9\s]",
        r"\s",
    )
)


def build_tokenizer(out: Path) -> None:
    """Trains the byte-level BPE tokenizer on generated text and writes its two files.

    Digits are single tokens, the first of a number with its space; so are frequent pieces (``
    (left:``, ``)\\n``, words). The person or room a fact is about is one token with its verb (``
    Tom has``), other mentions (`` Tom``) are another: what follows a subject is then found by
    looking for one token. Any text round-trips.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    texts = [
        "The answer is yes. No, it can not be reached. Is this right? Solve. Make Use Using numbers\n"
        "So let us think step by step. First Second Next Therefore Question Solution Problem\n"
    ] * 50
    trees = Trees(lambda text: list(text.encode()))
    for _ in range(400):
        for document in (trees.countdown(rng), trees.chains(rng, 16), trees.recall(rng, 12)):
            texts += [bytes(segment.tokens).decode() for segment in document.segments]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        min_frequency=2,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.save_pretrained(out)


def extend_tokenizer(file: Path, people: Sequence[str]) -> None:
    """Lets an older tokenizer read today's `PIECES`: every name, alone and with its verb, that is
    several tokens becomes one more token.
    """
    from tokenizers import Tokenizer

    document = json.loads(file.read_text())
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": PIECES}
    vocabulary, merges = document["model"]["vocab"], document["model"]["merges"]
    for word in (f" {name}{verb}" for name in people for verb in ("", " has", " =")):
        known = Tokenizer.from_str(json.dumps(document))
        first, *others = known.encode(word, add_special_tokens=False).tokens
        for other in others:
            merges.append([first, other])
            first += other
            vocabulary.setdefault(first, len(vocabulary))
    file.write_text(json.dumps(document, ensure_ascii=False, indent=2))


@dataclass
class Segment:
    """A run of tokens: `parent` is an index into the document (-1: root), `weights` the loss weight
    of each token."""

    parent: int
    tokens: list[int]
    weights: list[float]
    kinds: list[int]


@dataclass
class Document:
    """A tree of segments; a parent comes before its children."""

    segments: list[Segment] = field(default_factory=list)

    def add(self, parent: int, tokens: list[int], weights: list[float], kinds: list[int]) -> int:
        """Appends a segment and returns its index."""
        self.segments.append(Segment(parent, tokens, weights, kinds))
        return len(self.segments) - 1

    def __len__(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    def numbers(self) -> list[tuple[int, int]]:
        """Number of each segment in depth-first order, and the first number after its subtree."""
        sizes = [1] * len(self.segments)
        for index in range(len(sizes) - 1, -1, -1):
            parent = self.segments[index].parent
            if parent >= 0:
                sizes[parent] += sizes[index]
        found: list[tuple[int, int]] = []
        free: list[int] = []  # the next number below a segment
        top = 0
        for segment, size in zip(self.segments, sizes, strict=True):
            first = free[segment.parent] if segment.parent >= 0 else top
            if segment.parent >= 0:
                free[segment.parent] += size
            else:
                top += size
            found.append((first, first + size))
            free.append(first + 1)
        return found


class Trees:
    """Makes training documents.

    Args:
        encode: text -> token ids, without the beginning-of-text token.
        bos: ids before each prompt.
        steps: of the longest word problems.
    """

    def __init__(self, encode: Any, bos: Sequence[int] = (), steps: int = 16) -> None:
        self._encode = encode
        self._cache: dict[str, list[int]] = {}
        self.bos = list(bos)
        self.game, self.numbers, self.rooms = Game24(), Countdown(), Recall()
        self.words = Chains(most=steps)

    def tokens(self, text: str) -> list[int]:
        """Ids of one line, memoised."""
        found = self._cache.get(text)
        if found is None:
            if len(self._cache) > 400_000:
                self._cache.clear()
            found = self._cache[text] = self._encode(text)
        return found

    def _root(self, document: Document, prompt: str) -> int:
        ids = self.bos + self.tokens(prompt)
        return document.add(-1, ids, [0.0] * len(ids), [0] * len(ids))

    def _ask(
        self, document: Document, parent: int, question: str, yes: bool, weight: float, kind: str
    ) -> None:
        ids = self.tokens(question) + self.tokens(" yes" if yes else " no")
        weights = [0.0] * (len(ids) - 1) + [weight]
        document.add(parent, ids, weights, [KINDS.index(kind)] * len(ids))

    # --- countdown
    # ------------------------------------------------------------------------------------------

    def _hand(self, rng: random.Random) -> tuple[tuple[int, ...], int]:
        """A set of numbers and a target that may be trained on."""
        roll = rng.random()
        if roll < 0.42:  # four numbers, one above 13: 24
            small = [rng.randint(1, 13) for _ in range(3)]
            return tuple(sorted([*small, rng.randint(14, 25)])), 24
        if roll < 0.72:  # what is left after the first step of a hand: three numbers, 24
            a, b, c = (rng.randint(1, 13) for _ in range(3))
            steps = legal_steps(tuple(sorted((rng.randint(1, 13), c))))
            result = rng.choice(steps).left[0]
            return tuple(sorted((a, b, int(result)))), 24
        if roll < 0.92:  # four small numbers, other targets
            hand = tuple(sorted(rng.randint(1, 13) for _ in range(4)))
            target = rng.randint(10, 40) if rng.random() < 0.7 else rng.randint(10, 99)
            return hand, target if target != 24 else 25
        count = rng.choice((5, 5, 6))
        state: tuple[int, ...] = tuple(sorted(rng.randint(1, 25) for _ in range(count)))
        left = state
        while len(left) > 1:
            left = rng.choice(legal_steps(left)).left  # type: ignore[arg-type, assignment]
        return state, left[0] if 10 <= left[0] <= 99 else 24

    def _allowed(self, hand: tuple[int, ...], target: int) -> bool:
        # classic hands are held out, solvable or not
        if target == TARGET and len(hand) == 4 and max(hand) <= LARGEST_CARD:
            return False
        return (
            len(hand) != 4
            or target == 24
            or split_of(self.numbers.make(hand, target).id) == "train"
        )

    def countdown(self, rng: random.Random) -> Document:
        """A tree of one Countdown problem: solutions, detours, a question after every state."""
        while True:
            hand, target = self._hand(rng)
            if not self._allowed(hand, target):
                continue
            if len(hand) > 4 or can_reach(hand, target) or rng.random() < 0.2:
                break
        document = Document()
        prompt = self.numbers.prompt(self.numbers.make(hand, target))
        root = self._root(document, prompt)
        if len(hand) <= 3:
            self._judge(document, root, hand, target, True)
        self._grow(document, root, hand, target, rng, True, 2 if len(hand) <= 4 else 1)
        return document

    def _judge(
        self, document: Document, node: int, state: tuple[int, ...], target: int, legal: bool
    ) -> None:
        yes = legal and can_reach(state, target)
        self._ask(document, node, "Reachable?", yes, JUDGE_WEIGHT, "judge")

    def _grow(
        self,
        document: Document,
        node: int,
        state: tuple[int, ...],
        target: int,
        rng: random.Random,
        policy: bool,
        width: int,
    ) -> None:
        """Adds children: `width` the policy should take (one below depth 1), and some it is only
        judged on."""
        steps = [
            step
            for step in legal_steps(state)
            if step.result <= LARGEST_RESULT and self._fits(step, target)
        ]
        if not steps:
            return
        big = len(state) > 4
        solvable = not big and can_reach(state, target)
        good = [step for step in steps if can_reach(step.left, target)] if solvable else []
        chosen: list[tuple[ParsedStep, float]] = []
        for _ in range(width if policy else 0):
            if good and rng.random() < 0.9:
                chosen.append((rng.choice(good), 1.0))
            else:
                chosen.append((rng.choice(steps), 0.5 if good or big else 0.2))
        others = {4: 2, 3: 1 if rng.random() < 0.8 else 2, 2: int(rng.random() < 0.25)}.get(
            len(state), 0
        )
        for _ in range(others):
            chosen.append((rng.choice(steps), 0.0))
        seen: list[str] = []
        for step, weight in chosen:
            text, left = step.text, step.left
            if text in seen:
                if weight:  # the same choice again: it counts twice, but its text stands once
                    index = next(
                        i
                        for i, s in enumerate(document.segments)
                        if s.parent == node and s.tokens == self.tokens(text)
                    )
                    ids = document.segments[index]
                    cut = ids.tokens.index(self.tokens(" =")[0]) + 1
                    ids.weights[:cut] = [w + weight for w in ids.weights[:cut]]
                continue
            seen.append(text)
            legal = True
            if weight == 0.0 and rng.random() < 0.1:
                text, legal = self._spoil(step, rng), False
            ids_ = self.tokens(text)
            cut = ids_.index(self.tokens(" =")[0]) + 1
            after = 1.0 if legal else 0.0
            weights = [weight] * cut + [after] * (len(ids_) - cut)
            kinds = [KINDS.index("choice")] * cut + [KINDS.index("result")] * (len(ids_) - cut)
            child = document.add(node, ids_, weights, kinds)
            numbers = tuple(int(n) for n in left)
            if len(numbers) < 5 and (len(numbers) > 1 or rng.random() < 0.3):
                self._judge(document, child, numbers, target, legal)
            if len(numbers) > 1 and legal and weight:
                self._grow(document, child, numbers, target, rng, True, 1)

    def _fits(self, step: ParsedStep, target: int) -> bool:
        return not (target == 24 and len(step.left) == 4 and max(step.left) <= 13)

    def _spoil(self, step: ParsedStep, rng: random.Random) -> str:
        """The step with one thing wrong: its result (and what follows from it), or what is left."""
        off = rng.choice((-2, -1, 1, 2, 10))
        wrong = max(0, int(step.result) + off)
        wrong = wrong if wrong != step.result else wrong + 1
        left = list(step.left)
        left.remove(step.result)
        if rng.random() < 0.6:
            return ParsedStep(step.a, step.sign, step.b, wrong, tuple(sorted([*left, wrong]))).text
        if left and rng.random() < 0.5:
            at = rng.randrange(len(left))
            left[at] = max(1, int(left[at]) + rng.choice((-1, 1)))
        else:
            left.append(rng.choice((step.a, step.b)))
        return ParsedStep(
            step.a, step.sign, step.b, step.result, tuple(sorted([*left, step.result]))
        ).text

    # --- chains and recall
    # -----------------------------------------------------------------------------------------

    def chains(self, rng: random.Random, most: int) -> Document:
        """A word problem with at most so many steps; some states are asked about, some lines
        spoiled for that."""
        few = dataclasses.replace(self.words, distractors=min(self.words.distractors, most))
        while True:
            problem = few.draw(rng, 2 + int((most - 1) * rng.random()))
            if split_of(problem.id) == "train":
                break
        return self._path(self.words, problem, self.words.solution(problem), rng, "chains")

    def facts(self, rng: random.Random, most: int) -> Document:
        """Facts, stated and then restated in another order: nothing but looking up what was stated
        of a name.

        Chains are mostly lines that follow from the line before; without these documents the
        look-up is learned late.
        """
        steps, others = rng.randint(2, most), rng.randint(1, most)
        facts, asked = generate(rng, steps, others, 1, self.words.people)
        document = Document()
        problem = self.words.make(facts, asked)
        node = self._root(document, self.words.prompt(problem))
        rng.shuffle(facts)
        kind = KINDS.index("facts")
        for fact in facts:
            ids = self.tokens(f"Then {fact.text}:")
            weights = [0.0] * 2 + [2.0] * (len(ids) - 2)  # which name comes next is chance
            node = document.add(node, ids, weights, [kind] * len(ids))
        return document

    def recall(self, rng: random.Random, most: int) -> Document:
        """A search through at most so many rooms."""
        while True:
            problem = self.rooms.draw(rng, rng.randint(4, most))
            if split_of(problem.id) == "train":
                break
        return self._path(self.rooms, problem, self.rooms.solution(problem), rng, "recall")

    def _path(
        self, task: Any, problem: Any, thoughts: Sequence[str], rng: random.Random, kind: str
    ) -> Document:
        document = Document()
        node = self._root(document, task.prompt(problem))
        asked = KINDS.index(kind)
        for index, thought in enumerate(thoughts):
            if index and rng.random() < 0.2:
                spoiled = self._spoil_line(thought, thoughts, rng)
                if task.value(problem, [*thoughts[:index], spoiled]) == 0.0:
                    ids = self.tokens(spoiled)
                    wrong = document.add(node, ids, [0.0] * len(ids), [asked] * len(ids))
                    self._ask(document, wrong, "Correct?", False, 2.0, "chains-judge")
            ids = self.tokens(thought)
            weight = 3.0 if thought.startswith("Plan") else 1.0
            node = document.add(node, ids, [weight] * len(ids), [asked] * len(ids))
            if rng.random() < 0.2:
                self._ask(document, node, "Correct?", True, 2.0, "chains-judge")
        return document

    def _spoil_line(self, thought: str, thoughts: Sequence[str], rng: random.Random) -> str:
        """The line with one number changed, or another line of the path in its place."""
        words = thought.rstrip("\n").split(" ")
        numbers = [i for i, word in enumerate(words) if word.isdigit()]
        if not numbers or rng.random() < 0.15:
            return rng.choice(list(thoughts))
        at = numbers[-1] if rng.random() < 0.5 else rng.choice(numbers)
        words[at] = str(max(0, int(words[at]) + rng.choice((-10, -2, -1, 1, 2, 10))))
        return " ".join(words) + "\n"


@dataclass
class Batch:
    """One micro-batch.

    Attributes:
        ids, positions: [R, T] int64.
        enter, leave: [R, T] int32; numbers of a token's segment in depth-first order, and the first
            number after the segments below it.
        at, target: [M] int64; position in the flattened rows that predicts, and the token.
        weight: [M] float32.
        kind: [M] int8, index into `KINDS`.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    enter: NDArray[np.int32]
    leave: NDArray[np.int32]
    at: NDArray[np.int64]
    target: NDArray[np.int64]
    weight: NDArray[np.float32]
    kind: NDArray[np.int8]


def pack(documents: Sequence[Document], rows: int, length: int) -> tuple[Batch, list[Document]]:
    """Lays documents into rows (first fit, longest first); returns what found no room as well."""
    order = sorted(range(len(documents)), key=lambda i: (-len(documents[i]), i))
    used = [0] * rows
    ids = np.zeros((rows, length), np.int64)
    positions = np.zeros((rows, length), np.int64)
    enter = np.zeros((rows, length), np.int32)
    enter -= np.arange(1, length + 1, dtype=np.int32)  # a place without a token sees itself alone
    leave = np.zeros((rows, length), np.int32)
    numbered = [0] * rows
    at: list[int] = []
    target: list[int] = []
    weight: list[float] = []
    kind: list[int] = []
    rest: list[Document] = []
    for index in order:
        document = documents[index]
        size = len(document)
        row = next((r for r in range(rows) if used[r] + size <= length), -1)
        if row < 0:
            rest.append(document)
            continue
        start = used[row]
        used[row] += size
        spans: list[tuple[int, int, int]] = []  # first token, end, depth of the first token
        for segment, (number, after) in zip(document.segments, document.numbers(), strict=True):
            n = len(segment.tokens)
            first, depth = start, 0
            if segment.parent >= 0:
                pfirst, pend, pdepth = spans[segment.parent]
                depth = pdepth + pend - pfirst
                before = pend - 1
            else:
                before = -1
            enter[row, first : first + n] = numbered[row] + number
            leave[row, first : first + n] = numbered[row] + after
            ids[row, first : first + n] = segment.tokens
            positions[row, first : first + n] = np.arange(depth, depth + n)
            for i, (token, w) in enumerate(zip(segment.tokens, segment.weights, strict=True)):
                previous = first + i - 1 if i else before
                if w > 0 and previous >= 0:
                    at.append(row * length + previous)
                    target.append(token)
                    weight.append(w)
                    kind.append(segment.kinds[i])
            spans.append((first, first + n, depth))
            start += n
        numbered[row] += len(document.segments)
    arrays = (np.array(at, np.int64), np.array(target, np.int64))
    extra = (np.array(weight, np.float32), np.array(kind, np.int8))
    return Batch(ids, positions, enter, leave, *arrays, *extra), rest


@dataclass(frozen=True)
class Mix:
    """What one optimiser step sees: rows of `TREE` tokens of countdown, and as many tokens as in so
    many rows of words.

    Word problems come first, since looking facts up takes the longest to learn; once they have
    their full length, countdown takes most of the rows.
    """

    growing: tuple[int, int] = (3, 7)  # countdown, words
    grown: tuple[int, int] = (7, 3)
    recall_share: float = 0.15
    facts_share: float = 0.65  # at the start; a third of it later
    long_every: int = 2
    steps: int = 16  # of the longest word problems
    rooms: int = 16  # of the largest recall problems
    long: int = 640  # tokens in a row of the longest


def batches(
    trees: Trees, mix: Mix, seed: int, first: int, level: Any, stride: int = 1
) -> Iterator[list[Batch]]:
    """The micro-batches of the optimiser steps `first`, `first + stride`, and so on; step i depends
    on (seed, i) and the curriculum.

    Args:
        level: object with `.value` in [0, 1]; word problems grow from two steps to `mix.steps` with
            it.
    """
    step = first
    while True:
        rng = random.Random(f"{seed} {step}")
        grown = level.value
        countdown_rows, word_rows = mix.grown if grown >= 1 else mix.growing
        game = [trees.countdown(rng) for _ in range(int(countdown_rows * TREE / 122))]
        long = grown > 0.45 and step % mix.long_every == 0
        length = mix.long if long else SHORT if grown < 0.15 else MIDDLE
        rows = max(1, word_rows * MIDDLE // length)
        room = rows * length
        words: list[Document] = []
        while room > 0:
            roll = rng.random()
            if roll < mix.facts_share / (3 if grown else 1):
                document = trees.facts(rng, 5 if grown < 0.25 else 8)
            elif roll > 1 - mix.recall_share:
                document = trees.recall(rng, 4 + round((mix.rooms - 4 if long else 6) * grown))
            else:
                document = trees.chains(rng, 2 + round((mix.steps - 2 if long else 8) * grown))
            if len(document) <= length:
                words.append(document)
                room -= len(document)
        yield [pack(game, countdown_rows, TREE)[0], pack(words, rows, length)[0]]
        step += stride


def _produce(
    directory: str, mix: Mix, seed: int, first: int, level: Any, queue: Any, stride: int
) -> None:
    """Body of a data process."""
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    begin = tokenizer.token_to_id(BOS)
    assert begin is not None
    queue.cancel_join_thread()
    parent = os.getppid()
    trees = Trees(encode, [begin], mix.steps)
    for batch in batches(trees, mix, seed, first, level, stride):
        while True:
            if os.getppid() != parent:  # the trainer is gone
                return
            try:
                queue.put(batch, timeout=20)
                break
            except Full:
                continue


# --- model
# ------------------------------------------------------------------------------------------

import torch  # noqa: E402  (the data process does not need the parts below)
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; names as in `transformers.LlamaConfig`."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention by plain matrix products on a CPU in bfloat16: rows this short, 2.5 times as fast
    as torch's fused one. Else the fused one: float32 needs 0.6 of the time with rows of 1,408.

    Args:
        q: [R, H, T, D].
        k, v: [R, K, T, D].
        bias: [R, T, T], 0 where a token is seen and very negative where not.

    Returns:
        [R, H, T, D].
    """
    rows, heads, length, size = q.shape
    groups = k.shape[1]
    if q.dtype is torch.float32 or q.is_cuda:
        k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None])
    fold = (rows * groups, heads // groups * length, size)
    added = bias[:, None].expand(rows, heads, length, length).reshape(*fold[:2], length)
    k, v = k.reshape(-1, length, size), v.reshape(-1, length, size)
    scores = torch.baddbmm(added, q.reshape(fold), k.mT, alpha=size**-0.5)
    return torch.bmm(scores.softmax(-1), v).view(q.shape)


class Layer(nn.Module):
    """A Llama decoder layer; parameters are named as in Hugging Face's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, f, h = shape.hidden_size, shape.intermediate_size, shape.head_dim
        self.shape = shape
        self.input_layernorm = nn.RMSNorm(d, shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(d, shape.rms_norm_eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(d, shape.num_attention_heads * h, bias=False),
                "k_proj": nn.Linear(d, shape.num_key_value_heads * h, bias=False),
                "v_proj": nn.Linear(d, shape.num_key_value_heads * h, bias=False),
                "o_proj": nn.Linear(shape.num_attention_heads * h, d, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(d, f, bias=False),
                "up_proj": nn.Linear(d, f, bias=False),
                "down_proj": nn.Linear(f, d, bias=False),
            }
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
        """x [R, T, d], cos and sin [R, 1, T, head_dim], bias [R, T, T] -> [R, T, d]."""
        rows, length, _ = x.shape
        a = self.self_attn
        y = self.input_layernorm(x)

        def heads(z: Tensor) -> Tensor:
            return z.view(rows, length, -1, self.shape.head_dim).transpose(1, 2)

        def rotate(z: Tensor) -> Tensor:
            half = z.shape[-1] // 2
            return z * cos + torch.cat((-z[..., half:], z[..., :half]), -1) * sin

        q, k, v = (
            rotate(heads(a["q_proj"](y))),
            rotate(heads(a["k_proj"](y))),
            heads(a["v_proj"](y)),
        )
        out = attention(q, k, v, bias)
        x = x + a["o_proj"](out.transpose(1, 2).reshape(rows, length, -1))
        y = self.post_attention_layernorm(x)
        m = self.mlp
        return x + m["down_proj"](F.silu(m["gate_proj"](y)) * m["up_proj"](y))


class Model(nn.Module):
    """Llama with tied embeddings, no cache: the lean forward for training. `export` gives the same
    logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = EMBEDDING if "embed" in name else parameter.shape[1] ** -0.5
                nn.init.normal_(
                    parameter, std=scale * ((2 * shape.num_hidden_layers) ** -0.5 if deep else 1)
                )
        self._look_up()

    @torch.no_grad()
    def _look_up(self) -> None:
        """Start with heads that look back, and one that finds what followed a token the last time
        it stood there.

        Looking up a fact needs a head that finds a token by what stood before it, on top of one
        that looks back: an induction head (Olsson et al., 2022). A small model takes long to find
        the pair (Singh et al., 2024), but it can be written down, and training starts from there:

            layer 0   heads 0 to 3 look 1, 2, 1 and 3 tokens back. All embeddings share one
                      component, so queries and keys can have a part that is the same for every
                      token; rotated by position, their product is largest `back` tokens apart:
                      sum_f cos(w_f (p - t - back)), w_f the six fastest rotary frequencies. Head 0
                      writes what it saw, V e, into directions U of its own.
            layer 1   head 0 compares V e of the token at hand with what lies in U of the others, in
                      the rotary dimensions too slow to notice the distance, and copies the token it
                      finds.
        """
        layers: Any = self.layers
        shape, first, second = self.shape, layers[0].self_attn, layers[1].self_attn
        size, half = shape.head_dim, shape.head_dim // 2
        self.embed_tokens.weight[:, 0] = 8 * EMBEDDING  # RMSNorm makes 7.2 of it, 0.9 of the others
        strength = 5.6 / 7.2
        speed = shape.rope_theta ** (-torch.arange(6) / half)
        group = shape.num_attention_heads // shape.num_key_value_heads
        for pair, backs in enumerate(((1, 2), (1, 3))):
            key = first["k_proj"].weight[pair * size :]
            key[:6, 0], key[half : half + 6, 0] = strength, 0.0
            for place, back in enumerate(backs):
                query = first["q_proj"].weight[(pair * group + place) * size :]
                query[:6, 0] = strength * torch.cos(speed * back)
                query[half : half + 6, 0] = -strength * torch.sin(speed * back)
        seen = first["v_proj"].weight[:size]
        seen[:, 0] = 0.0
        written = torch.linalg.qr(torch.randn(shape.hidden_size, size))[0]
        first["o_proj"].weight *= 0.3  # the other heads drown neither the token itself nor this
        first["o_proj"].weight[:, :size] = 0.3 * written
        slow = torch.cat((torch.arange(half // 2, half), torch.arange(half + half // 2, size)))
        for weight, reads in (
            (second["q_proj"].weight, seen),
            (second["k_proj"].weight, written.T),
        ):
            weight[:size] = 0.0
            weight[slow] = 3.0 * reads[: len(slow)]
        second["o_proj"].weight[:, :size] = 2 * second["v_proj"].weight[:size].T

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """ids, positions [R, T]; mask [R, T, T] bool -> final hidden states [R, T, d]."""
        half = torch.arange(0, self.shape.head_dim, 2, device=ids.device).float()
        angle = positions[..., None].float() * self.shape.rope_theta ** (
            -half / self.shape.head_dim
        )
        angle = torch.cat((angle, angle), -1)[:, None]
        number = torch.bfloat16 if torch.is_autocast_enabled(ids.device.type) else torch.float32
        cos, sin = angle.cos().to(number), angle.sin().to(number)
        bias = torch.zeros(mask.shape, dtype=number, device=ids.device).masked_fill_(~mask, -3e4)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, bias)
        return self.norm(x)


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal by Newton-Schulz iterations, matrices of one shape together.

    Source: K. Jordan et al., Muon, 2024; coefficients from Polar Express (Amsel et al., arXiv
    2505.16932).
    """

    COEFFICIENTS = (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    )

    def __init__(
        self,
        params: Any,
        lr: float,
        dtype: torch.dtype,
        momentum: float = 0.95,
        weight_decay: float = 0.02,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype  # of the iterations

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for p in group["params"]:
                shapes.setdefault(tuple(p.shape), []).append(p)
            for shape, params in shapes.items():
                updates = []
                for p in params:
                    state = self.state[p]
                    if "m" not in state:
                        state["m"] = torch.zeros_like(p)
                    assert p.grad is not None
                    state["m"].lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(state["m"], group["momentum"]))
                x = torch.stack(updates).to(self.dtype)
                tall = shape[0] > shape[1]
                x = x.mT.contiguous() if tall else x
                x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-7)
                for a, b, c in self.COEFFICIENTS:
                    gram = x @ x.mT
                    x = torch.baddbmm(
                        x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a
                    )
                x = x.mT if tall else x
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(params, x.float(), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


def export(model: Model, tokens: Path, out: Path) -> None:
    """Writes the model as Hugging Face files, each by rename, weights last; numbers are rounded to
    bfloat16.
    """
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        **{k: v for k, v in asdict(model.shape).items() if k != "rope_theta"},
        rope_parameters={"rope_type": "default", "rope_theta": model.shape.rope_theta},
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    twin = LlamaForCausalLM(config).eval()
    state = {
        f"model.{name}": value.detach().float().cpu() for name, value in model.state_dict().items()
    }
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    twin.load_state_dict(state)
    twin.generation_config = GenerationConfig(
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        twin.bfloat16().save_pretrained(
            name
        )  # half the bytes; read as float32, which the config says
        config_file = Path(name, "config.json")
        config_file.write_text(config_file.read_text().replace("bfloat16", "float32"))
        for part in ("tokenizer.json", "tokenizer_config.json"):
            text = (tokens / part).read_text()
            (Path(name) / part).write_text(
                text.replace("TokenizersBackend", "PreTrainedTokenizerFast")
            )
        files = sorted(Path(name).iterdir(), key=lambda file: file.suffix == ".safetensors")
        for file in files:
            file.chmod(0o644)
            file.replace(out / file.name)


def load_weights(model: Model, directory: Path) -> None:
    """Loads saved weights into the lean model."""
    from safetensors.torch import load_file

    state = load_file(str(directory / "model.safetensors"))
    state = {name: weight.float() for name, weight in state.items()}
    old, new = state["model.embed_tokens.weight"], model.embed_tokens.weight.detach().clone()
    new[: len(old)] = old
    state["model.embed_tokens.weight"] = new
    model.load_state_dict(
        {k.removeprefix("model."): v for k, v in state.items() if k != "lm_head.weight"}
    )


def rate(share: float, hold: float = 0.35, floor: float = 0.01) -> float:
    """Factor on the learning rate: warm-up over 1 %, constant until `hold`, then a cosine to
    `floor`."""
    if share < 0.01:
        return 0.1 + 0.9 * share / 0.01
    if share < hold:
        return 1.0
    return floor + (1 - floor) * 0.5 * (
        1 + math.cos(math.pi * min(1.0, (share - hold) / (1 - hold)))
    )


def quick_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device has instructions for it, or where this torch cannot say; a CPU with
    AVX2 alone trains more than ten times as fast in float32 (900 and 67 tokens a second)."""
    if device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return torch.bfloat16
    has = torch.cpu.get_capabilities()
    return torch.bfloat16 if has.get("avx512_bf16") or has.get("bf16") else torch.float32


def visible(enter: Tensor, leave: Tensor) -> Tensor:
    """Which tokens of its row each token sees: those before it on its path, and itself.

    Returns:
        [R, T, T] bool.
    """
    length = enter.shape[1]
    reader, read = enter[:, :, None], enter[:, None, :]
    below = (read <= reader) & (reader < leave[:, None, :])
    return below & torch.ones(length, length, dtype=torch.bool, device=enter.device).tril()


def loss_of(
    model: Any, weight: Tensor, batch: Batch, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross entropies, and for each of `KINDS` its targets, the sum of their cross
    entropies and how many were the most likely token, [3, kinds]; activations have `dtype`."""
    ids, positions, enter, leave, at, target, w, kind = (
        torch.from_numpy(a).to(device)
        for a in (
            *(batch.ids, batch.positions, batch.enter, batch.leave),
            *(batch.at, batch.target, batch.weight, batch.kind.astype(np.int64)),
        )
    )
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
        hidden = model(ids, positions, visible(enter, leave)).flatten(0, 1)
        logits = (hidden.index_select(0, at) @ weight.T).float()
    each = F.cross_entropy(logits, target, reduction="none")
    right = logits.detach().argmax(-1) == target
    seen = torch.stack((torch.ones_like(w), each.detach(), right.float()))
    sums = torch.zeros(3, len(KINDS), device=device).index_add_(1, kind, seen)
    return (each * w).sum(), sums


def mixed(given: Sequence[str]) -> dict[str, Any]:
    """The fields of a `Mix` from texts NAME=N."""
    pairs = (item.split("=") for item in given)
    shares = ("recall_share", "facts_share")
    return {name: (float if name in shares else int)(value) for name, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=80, help="wall-clock budget of the whole schedule"
    )
    parser.add_argument(
        "--steps", type=int, help="of the whole schedule, in place of --minutes; with --level 1"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build/sapling"), help="checkpoints, log, evaluation"
    )
    parser.add_argument(
        "--out", type=Path, help="where the model is exported to, e.g. arbor/sapling"
    )
    parser.add_argument("--export-every", type=float, default=20, help="minutes between exports")
    parser.add_argument(
        "--export-only", action="store_true", help="export the last checkpoint and stop"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint of --work"
    )
    parser.add_argument("--init", type=Path, help="start from these saved weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of activations (default: bfloat16 where the device has instructions for it)",
    )
    parser.add_argument("--muon", type=float, default=0.006, help="learning rate of the matrices")
    parser.add_argument(
        "--adam", type=float, default=2e-3, help="learning rate of embedding and norms"
    )
    parser.add_argument("--rows", type=int, nargs=2, help="rows all along: countdown, words")
    parser.add_argument(
        "--mix",
        nargs="*",
        default=[],
        metavar="NAME=N",
        help="of `Mix`, as steps=32 rooms=26 long=1408 recall_share=0.4; with --init",
    )
    parser.add_argument(
        "--level", type=float, default=0.0, help="where word problems begin, 0 to 1; for --init"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="of a new model; trained if left out"
    )
    parser.add_argument("--producers", type=int, default=1, help="processes that make data")
    parser.add_argument(
        "--log-every", type=float, default=30, help="seconds; word problems may grow as often"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=N", help="sizes of the model")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype) if args.dtype else quick_dtype(device)
    args.work.mkdir(parents=True, exist_ok=True)
    mix = Mix(**mixed(args.mix))
    if args.rows:
        mix = dataclasses.replace(mix, growing=tuple(args.rows), grown=tuple(args.rows))
    tokens = args.work / "tokenizer"
    if not (tokens / "tokenizer.json").exists():
        older = args.init or args.tokenizer
        if older:
            tokens.mkdir(exist_ok=True)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (tokens / file).write_bytes((older / file).read_bytes())
            extend_tokenizer(tokens / "tokenizer.json", Chains(most=mix.steps).people)
        else:
            build_tokenizer(tokens)
    vocabulary = json.loads((tokens / "tokenizer.json").read_text())["model"]["vocab"]
    sizes = {name: int(value) for name, value in (item.split("=") for item in args.set)}
    checkpoint = args.work / "checkpoint.pt"
    saved = None
    if args.resume or args.export_only:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        sizes = saved["shape"]
    shape = Shape(**{"vocab_size": len(vocabulary), **sizes})
    model = Model(shape).to(device)
    if args.init:
        load_weights(model, args.init)
    if saved:
        model.load_state_dict(saved["model"])
    if args.export_only:
        export(model, tokens, args.out or Path(__file__).resolve().parents[1] / "arbor" / "sapling")
        return
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    optimisers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=args.muon, dtype=dtype),
        torch.optim.AdamW(others, lr=args.adam, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    step, spent, seen, reached = 0, 0.0, 0, args.level
    if saved:
        step, spent, seen = saved["step"], saved["spent_s"], saved["tokens"]
        reached = saved.get("level", 0.0)
        for optimiser, state in zip(optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
    base = [[args.muon], [args.adam]]

    context = multiprocessing.get_context("spawn")
    budget = args.minutes * 60
    level = context.Value("d", reached)
    queue = context.Queue(maxsize=24)
    producers = [
        context.Process(
            target=_produce,
            args=(str(tokens), mix, args.seed, step + turn, level, queue, args.producers),
            daemon=True,
        )
        for turn in range(args.producers)
    ]
    for producer in producers:
        producer.start()
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"shape": asdict(shape), "parameters": parameters}), flush=True)

    def save() -> None:
        state = {
            "model": model.state_dict(),
            "optimisers": [o.state_dict() for o in optimisers],
            "shape": asdict(shape),
            "step": step,
            "spent_s": spent,
            "tokens": seen,
            "level": level.value,
        }
        torch.save(state, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)

    started, before = time.monotonic(), spent
    exported, logged, kept = spent, spent, spent
    sums = torch.zeros(3, len(KINDS), device=device)
    counted = -1  # tokens at the last line of the log
    waited = 0.0
    while (share := step / args.steps if args.steps else spent / budget) < 1:
        mark = time.monotonic()
        micro = queue.get()
        waited += time.monotonic() - mark
        factor = rate(share)
        for optimiser, rates in zip(optimisers, base, strict=True):
            for group, lr in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = lr * factor
        total = sum(float(batch.weight.sum()) for batch in micro)
        for batch in micro:
            loss, found = loss_of(model, model.embed_tokens.weight, batch, device, dtype)
            (loss / total).backward()
            seen += int((batch.positions > 0).sum())
            sums += found
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step += 1
        spent = before + time.monotonic() - started
        if spent - logged > args.log_every:
            line: dict[str, Any] = {"step": step, "minutes": round(spent / 60, 1), "tokens": seen}
            line["tokens_per_s"] = (
                round((seen - counted) / (spent - logged)) if counted >= 0 else None
            )
            line["waited_s"] = round(waited, 1)
            line["level"] = round(level.value, 2)
            learned = ("chains",) if level.value else ("chains", "facts")
            of_kind = dict(zip(KINDS, sums.T.tolist(), strict=True))
            if all(of_kind[kind][2] >= MASTERED * of_kind[kind][0] for kind in learned):
                level.value = min(1.0, level.value + 0.1)
            for kind, (n, lost, right) in of_kind.items():
                if n:
                    line[kind] = [round(lost / n, 3), round(right / n, 3)]
            print(json.dumps(line), flush=True)
            sums.zero_()
            counted, logged, waited = seen, spent, 0.0
        if spent - kept > 180:
            save()
            kept = spent
        if args.out is not None and spent - exported > args.export_every * 60:
            export(model, tokens, args.out)
            exported = spent
    save()
    if args.out is not None:
        export(model, tokens, args.out)
    for producer in producers:
        producer.terminate()


if __name__ == "__main__":
    main()
