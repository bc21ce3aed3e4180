"""The process that compares mathematics by math-verify; `ScriptProcess` runs this file as a script.

A verdict of the library is kept unless the two differ as numbers: it takes 1/2006! for 1/2004!.
Numbers are therefore compared again, at 60 digits. Decimals are the fractions that they write.
Those that the library has evaluated already, as in e^0.5, have 15 digits, of which 12 count.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import re
import sys
from typing import Any

DIGITS = 60  # of precision
AGREE = 40  # leading digits by which equal numbers agree
AGREE_ROUNDED = 12  # the same where one of them was evaluated to 15 digits
LONGEST_NUMBER = 10**6  # digits; an answer that needs a longer one is not evaluated

_DECIMAL = re.compile(r"\d*\.\d+|\d+\.")


class TooLarge(Exception):
    """An expression with a number that is too long to evaluate."""


def main() -> None:
    """Answer requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is not a reply
    limits = json.loads(sys.stdin.readline())
    logging.disable(logging.CRITICAL)
    equal = comparison()
    _limit_memory(limits["memory_bytes"])
    print("{}", file=replies, flush=True)
    for line in sys.stdin:
        _limit_cpu(limits["answer_s"])
        request = json.loads(line)
        try:
            library, ours = equal(request["expected"], request["answer"])
            reply = {"equal": ours, "library": library}
        except TooLarge:
            reply = {"too_large": True}
        except Exception as error:  # of the library, at any text
            reply = {"error": type(error).__name__}
        print(json.dumps(reply), file=replies, flush=True)


def comparison() -> Any:
    """The comparison of a key with an answer; imports the library."""
    from math_verify import LatexExtractionConfig, parse, verify

    latex = [LatexExtractionConfig()]

    def equal(expected: str, answer: str) -> tuple[bool, bool]:
        """Whether the library calls the two equal, and whether they are."""
        gold, given = (
            parse(
                f"${text}$",  # without the signs an equation reads as 0
                extraction_config=latex,
                fallback_mode="no_fallback",
                parsing_timeout=None,
                raise_on_error=True,
            )
            for text in (expected, answer)
        )
        if not gold or not given:
            return False, False
        if gold == given:
            return True, True
        if any(map(too_large, (*gold, *given))):
            raise TooLarge
        gold, given = exact(gold, expected), exact(given, answer)
        if not verify(gold, given, timeout_seconds=None):
            return False, False
        return True, not all(differ(one, two) for one, two in itertools.product(gold, given))

    return equal


def too_large(expression: Any) -> bool:
    """Whether a number in an expression may have more than `LONGEST_NUMBER` digits."""
    import sympy

    return isinstance(expression, sympy.Basic) and any(
        _magnitude(each) > LONGEST_NUMBER for each in sympy.preorder_traversal(expression)
    )


def _magnitude(expression: Any) -> float:
    """A bound of the digits of a number and of its inverse; 1 for a symbol."""
    import sympy

    if isinstance(expression, sympy.Rational):
        return max(abs(int(expression.p)).bit_length(), int(expression.q).bit_length()) * 0.302
    inner = [_magnitude(each) for each in expression.args]
    if isinstance(expression, sympy.Pow):
        base, exponent = inner
        if expression.base in (0, 1, -1):
            return 1.0
        return max(base, 1.0) * 10**exponent if exponent < 300 else math.inf
    if isinstance(expression, sympy.factorial | sympy.gamma | sympy.binomial | sympy.exp):
        most = max(inner)
        return most * 10**most if most < 300 else math.inf
    return sum(inner, 1.0)


def exact(expressions: list[Any], text: str) -> list[Any]:
    """Expressions with the decimals of their text as fractions."""
    import sympy

    written = {sympy.Float(each): sympy.Rational(each) for each in _DECIMAL.findall(text)}
    signed = written | {-number: -fraction for number, fraction in written.items()}
    return [
        each.xreplace(signed) if isinstance(each, sympy.Basic | sympy.MatrixBase) else each
        for each in expressions
    ]


def differ(one: Any, two: Any) -> bool:
    """Whether two expressions certainly differ: as numbers, or in a number they consist of."""
    import sympy

    if isinstance(one, sympy.Tuple) and isinstance(two, sympy.Tuple):
        return len(one) != len(two) or any(map(differ, one, two))
    if isinstance(one, sympy.FiniteSet) and isinstance(two, sympy.FiniteSet):
        return any(all(differ(a, b) for b in two) for a in one)
    if isinstance(one, sympy.Interval) and isinstance(two, sympy.Interval):
        return differ(one.start, two.start) or differ(one.end, two.end)
    if isinstance(one, sympy.MatrixBase) and isinstance(two, sympy.MatrixBase):
        return one.shape != two.shape or any(map(differ, one.flat(), two.flat()))
    if isinstance(one, sympy.Eq) and isinstance(two, sympy.Eq):
        return one.lhs == two.lhs and differ(one.rhs, two.rhs)
    if isinstance(one, sympy.Eq) or isinstance(two, sympy.Eq):
        one, two = (each.rhs if isinstance(each, sympy.Eq) else each for each in (one, two))
    values = list(itertools.product(numbers(one), numbers(two)))
    return bool(values) and not any(_agree(*a, *b) for a, b in values)


def numbers(expression: Any) -> list[tuple[Any, int]]:
    """The numbers an expression may stand for, each with how many of its digits count.

    9 % is 9/100, and by custom 9. An expression that is no number has none.
    """
    import sympy

    if not isinstance(expression, sympy.Expr) or not expression.is_number:
        return []
    found = [expression]
    percent = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    if isinstance(expression, sympy.Mul) and percent in expression.args:
        found.append(sympy.Mul(*[each for each in expression.args if each != percent]))
    with contextlib.suppress(Exception):
        values = [each.doit() for each in found]
        return [
            (each.evalf(DIGITS), AGREE_ROUNDED if each.has(sympy.Float) else AGREE)
            for each in values
        ]
    return []


def _agree(one: Any, of_one: int, two: Any, of_two: int) -> bool:
    """Whether two numbers have the same digits that count; also if they cannot be compared."""
    if one == two:
        return True
    try:
        return bool(abs(one - two) <= max(abs(one), abs(two)) * 10 ** -min(of_one, of_two))
    except TypeError:  # infinity, or a number that sympy cannot evaluate
        return True


def _limit_memory(most: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_cpu(seconds: float) -> None:
    """Ends this process some time after its parent should have, for a parent that is gone."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        most = int(usage.ru_utime + usage.ru_stime + 2 * seconds + 5)
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main()
