r"""Mathematics: equal expressions, by exact comparison first, then by math-verify in a process.

The library (0.9.0, Hugging Face) recognises equal expressions of another form: ``2x+3`` and
``3+2x``, ``2\sqrt{3}`` and ``\sqrt{12}``, unions in another order. It also calls equal what is not.
Decided here instead, before it is asked or after it:

- two plain numbers: exactly, without rounding (0.3333333 is not 1/3, 1/2006! not 1/2004!);
- a number with the subscript of a base: only the same digits in the same base (52_8 is not 52);
- brackets of different kinds: a set is not a point or an interval, (1,2) not \{1,2\};
- letters that differ in case (c and C), and factors in words (x and x million);
- a list in which an element stands twice: 5,5 is not 5;
- inequalities and an interval, whichever is the key: -2≤x≤7 and [-2,7];
- several boxes: the last one, by extraction.

Kept from it: an unordered list (1,2 and 2,1), ±2 and 2,-2, 50 % and 0.5 as well as 50 % and 50.
It misses a column vector written as a point, and products with i in another order.

The library evaluates powers and factorials of any size (``9^{9^{9^{9}}}``), and its own time limit
needs the main thread; so it runs in a `ScriptProcess`, which is killed after some
seconds. Numbers of over a million digits are not evaluated. An answer that ran out of time, ended
the process or needs such a number is wrong: ``timeout``, ``crashed`` or ``too-large``.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import math
import re
import threading
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from arbor.errors import UsageError
from arbor.tasks.base import Grade
from arbor.tasks.grading.base import Grader, graded
from arbor.tasks.grading.exact import canonical
from arbor.tasks.grading.extraction import marked
from arbor.tasks.grading.intervals import as_interval, is_interval
from arbor.tasks.grading.notation import (
    has_factor,
    in_digits_alone,
    in_thousands,
    is_percentage,
    normalise,
    number,
    same,
    without_spaces,
)
from arbor.tasks.grading.worker import ProcessLimits, Reply, ScriptProcess

logger = logging.getLogger(__name__)

SCRIPT = Path(__file__).with_name("math_worker.py")
PACKAGE = "math-verify"
REMEMBERED = 4096  # comparisons

_BASED = re.compile(r"-?(?:\d[\dA-Fa-f.]*_\d+|[\dA-Fa-f.]+_16)")
_WORD = re.compile(r"\\?[A-Za-z]+")
_PI = re.compile(r"\\?pi\b")
_CONDITION = re.compile(r"\||:|\\(?:mid|in)\b")  # of a set that is not a list of its elements


@dataclass(frozen=True)
class Mathematics(Grader):
    """Expressions compared by value.

    Attributes:
        seconds: most for one comparison; then the answer is wrong, with the method ``timeout``.
    """

    seconds: float = 5.0

    @property
    def version(self) -> str:
        return f"math/6 {PACKAGE}/{_library_version()}"

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
        extracted = extracted if number(key) is None else in_thousands(extracted)
        plain = number(extracted) is not None and number(key) is not None
        if same(extracted, key):
            return graded(True, extracted, key, "number" if plain else "text")
        if plain:
            return graded(_equal_as_shares(extracted, key), extracted, key, "number")
        one, two = in_one_notation(extracted, key)
        if never_equal(one, two):
            return graded(False, extracted, key, "text")
        self.check()
        reply = _compare(two, one, self.seconds)
        too_large = reply.status == "answered" and reply.data.get("too_large")
        outcome = "too-large" if too_large else reply.status
        if outcome != "answered":
            why = {
                "too-large": f"the comparison with {key} needs a number of over a million digits",
                "timeout": f"the comparison with {key} took longer than {self.seconds:g} s",
                "crashed": f"the process that compared it with {key} ended",
            }[outcome]
            return Grade(False, extracted, f"{outcome}: {why}.", outcome)
        equal = reply.data.get("equal") is True
        if reply.data.get("library") is True and not equal:
            logger.info("%s calls %s and %s equal; as numbers they differ", PACKAGE, key, extracted)
        return graded(equal, extracted, key, PACKAGE)

    def equal(self, first: str, second: str, seconds: float) -> bool:
        """See `Equates.equal`; a percentage is its number, 50 % and 50, and no share of one."""
        one, two = (canonical(each) for each in (first, second))
        if isinstance(one, Grade) or isinstance(two, Grade):
            return False
        one, two = in_one_notation(*sorted((one, two)))
        if same(one, two):
            return True
        plain = number(one) is not None and number(two) is not None
        if plain or never_equal(one, two) or seconds <= 0:
            return False
        ends = time.monotonic() + seconds
        for key, answer in ((one, two), (two, one)):
            reply = _compare(key, answer, self.seconds, ends - time.monotonic())
            if reply.status != "answered" or reply.data.get("equal") is True:
                return reply.status == "answered"
        return False


def in_one_notation(one: str, two: str) -> tuple[str, str]:
    """Two answers with numbers in digits, and inequalities as intervals where the other is one."""
    one, two = in_digits_alone(one), in_digits_alone(two)
    if is_interval(two):
        return as_interval(one) or one, two
    return (one, as_interval(two) or two) if is_interval(one) else (one, two)


def never_equal(answer: str, key: str) -> bool:
    """Whether two normalised answers that are not the same text differ for certain.

    Also where one of them has a factor in words, which the library would drop.
    """
    both = (answer, key)
    if any(map(_BASED.fullmatch, both)):
        return True
    factors = [has_factor(_PI.sub("", each)) for each in both]
    listed = [each.startswith("\\{") and not _CONDITION.search(each) for each in both]
    ordered = [each.startswith(("(", "[")) for each in both]
    if any(map(_repeats, both)) and not _same_elements(answer, key):
        return True  # 5, 5 is not 5
    if factors[0] != factors[1] or (listed[0] and ordered[1]) or (ordered[0] and listed[1]):
        return True
    letters = [sorted(filter(_is_symbol, _WORD.findall(each))) for each in both]
    folded = [sorted(word.casefold() for word in each) for each in letters]
    return letters[0] != letters[1] and folded[0] == folded[1]


def _elements(text: str) -> list[str]:
    """What stands between the commas of an answer that are in no bracket, without spaces."""
    depth, found = 0, [""]
    for character in without_spaces(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return found


def _repeats(text: str) -> bool:
    """Whether an answer is a list in which an element stands twice."""
    elements = _elements(text)
    return len(set(elements)) < len(elements)


def _same_elements(one: str, two: str) -> bool:
    """Whether two lists have the same elements, each as often."""
    left = _elements(two)
    for element in _elements(one):
        found = next((each for each in left if same(element, each)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _equal_as_shares(one: str, two: str) -> bool:
    """Whether two numbers are equal where a percentage is a share too: 50 % is 0.5."""
    values = [
        {value, value / 100 if is_percentage(text) else value}
        for text in (one, two)
        if (value := number(text)) is not None
    ]
    return bool(values[0] & values[1])


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
def worker(seconds: float) -> ScriptProcess:
    """The process of this program for comparisons of at most so many seconds."""
    found = ScriptProcess(SCRIPT, ProcessLimits(answer_s=seconds))
    atexit.register(found.close)
    return found


_replies: dict[tuple[str, str], Reply] = {}
_replies_lock = threading.Lock()


def _compare(key: str, answer: str, seconds: float, within: float = math.inf) -> Reply:
    """The worker's reply; one that ended badly is not kept: it may do better on an idle machine.

    Args:
        key, answer: normalised.
        seconds: most for one comparison.
        within: most for all of it, with the start of the process.
    """
    with _replies_lock:
        known = _replies.get((key, answer))
    if known is not None:
        return known
    reply = worker(seconds).ask({"expected": key, "answer": answer}, max(0.0, within))
    if reply.status == "answered":
        with _replies_lock:
            while len(_replies) >= REMEMBERED:
                del _replies[next(iter(_replies))]
            _replies[key, answer] = reply
    return reply
