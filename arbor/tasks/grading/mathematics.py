r"""Mathematics: equal expressions, by exact comparison first, then by math-verify in a process.

The library (0.9.0, Hugging Face) recognises equal expressions of another form: ``2x+3`` and
``3+2x``, ``2\sqrt{3}`` and ``\sqrt{12}``, unions in another order. It also calls equal what is not.
Decided here instead, before it is asked or after it:

- two plain numbers: exactly, without rounding (0.3333333 is not 1/3, 1/2006! not 1/2004!);
- a number with the subscript of a base: only the same digits in the same base (52_8 is not 52);
- brackets of different kinds: a set is not a point or an interval, (1,2) not \{1,2\};
- letters that differ in case (c and C), and factors in words (5 and 5 million);
- several boxes: the last one, by extraction.

Kept from it: an unordered list (1,2 and 2,1), ±2 and 2,-2, -2≤x≤7 and [-2,7], 50 % and 0.5 as well
as 50 % and 50. It misses words for numbers (six), a column vector written as a point, and products
with i in another order.

The library evaluates powers and factorials of any size (``9^{9^{9^{9}}}``), and its own time limit
needs the main thread; so it runs in a `Worker`, which is killed after some seconds. An answer that
ran out of time or ended the process is wrong, with the method ``timeout`` or ``crashed``.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from arbor.errors import UsageError
from arbor.tasks.base import Grade
from arbor.tasks.grading.base import graded
from arbor.tasks.grading.exact import canonical
from arbor.tasks.grading.extraction import marked
from arbor.tasks.grading.notation import FACTOR, normalise, number, same
from arbor.tasks.grading.worker import Limits, Reply, Worker

logger = logging.getLogger(__name__)

SCRIPT = Path(__file__).with_name("math_worker.py")
PACKAGE = "math-verify"
REMEMBERED = 4096  # comparisons

_BASED = re.compile(r"\d[\dA-Fa-f]*_(?:\{\s*\d+\s*\}|\d+)|[\dA-Fa-f]+_\{\s*16\s*\}")
_WORD = re.compile(r"\\?[A-Za-z]+")
_PI = re.compile(r"\\?pi\b")
_CONDITION = re.compile(r"\||:|\\(?:mid|in)\b")  # of a set that is not a list of its elements


@dataclass(frozen=True)
class Mathematics:
    """Expressions compared by value.

    Attributes:
        seconds: most for one comparison; then the answer is wrong, with the method ``timeout``.
    """

    seconds: float = 5.0

    @property
    def version(self) -> str:
        return f"math/1 {PACKAGE}/{_library_version()}"

    def check(self) -> None:
        """Refuse to begin without the library.

        Raises:
            UsageError: it is not installed.
        """
        if importlib.util.find_spec("math_verify") is None:
            raise UsageError(
                "extra-missing",
                f"grader=math needs {PACKAGE}, which is not installed.",
                "pip install 'arbor-search[math]', or compare numbers and texts: --set grader=exact.",
                extra="math",
            )

    def grade(self, answer: str | None, expected: str | None) -> Grade:
        """See `Grader.grade`.

        Raises:
            UsageError: the library is needed and not installed.
        """
        extracted = canonical(answer)
        if isinstance(extracted, Grade):
            return extracted
        if expected is None:
            return Grade(False, extracted, "The problem has no answer key.")
        key = normalise(marked(expected) or expected)
        plain = number(extracted) is not None and number(key) is not None
        if same(extracted, key):
            return graded(True, extracted, key, "number" if plain else "text")
        if plain and "%" not in extracted + key:
            return graded(False, extracted, key, "number")
        if never_equal(extracted, key):
            return graded(False, extracted, key, "text")
        self.check()
        reply = _compare(key, extracted, self.seconds)
        if reply.status != "answered":
            what = f"longer than {self.seconds:g} s" if reply.status == "timeout" else "no result"
            reason = f"{reply.status}: the comparison with {key} took {what}."
            if reply.status == "crashed":
                reason = f"crashed: the process that compared it with {key} ended."
            return Grade(False, extracted, reason, reply.status)
        equal = reply.data.get("equal") is True
        if reply.data.get("library") is True and not equal:
            logger.info("%s calls %s and %s equal; as numbers they differ", PACKAGE, key, extracted)
        return graded(equal, extracted, key, PACKAGE)


def never_equal(answer: str, key: str) -> bool:
    """Whether two normalised answers that are not the same text differ for certain.

    Also where one of them has a factor in words, which the library would drop.
    """
    both = (answer, key)
    if any(map(_BASED.fullmatch, both)):
        return True
    factors = [bool(FACTOR.search(_PI.sub("", each))) for each in both]
    listed = [each.startswith("\\{") and not _CONDITION.search(each) for each in both]
    ordered = [each.startswith(("(", "[")) for each in both]
    if factors[0] != factors[1] or (listed[0] and ordered[1]) or (ordered[0] and listed[1]):
        return True
    letters = [sorted(filter(_is_symbol, _WORD.findall(each))) for each in both]
    folded = [sorted(word.casefold() for word in each) for each in letters]
    return letters[0] != letters[1] and folded[0] == folded[1]


def _is_symbol(word: str) -> bool:
    """Whether letters are a symbol, whose case matters, and not a word."""
    return len(word) <= 2 or word.startswith("\\")


@functools.cache
def _library_version() -> str:
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return "none"


@functools.cache
def worker(seconds: float) -> Worker:
    """The process of this program for comparisons of at most so many seconds."""
    found = Worker(SCRIPT, Limits(answer_s=seconds))
    atexit.register(found.close)
    return found


class _Unanswered(Exception):
    """A comparison that ended badly; it may do better on an idle machine, so it is not kept."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply


def _compare(key: str, answer: str, seconds: float) -> Reply:
    try:
        return _answered(key, answer, seconds)
    except _Unanswered as ended:
        return ended.reply


@functools.lru_cache(maxsize=REMEMBERED)
def _answered(key: str, answer: str, seconds: float) -> Reply:
    reply = worker(seconds).ask({"expected": key, "answer": answer})
    if reply.status != "answered":
        raise _Unanswered(reply)
    return reply
