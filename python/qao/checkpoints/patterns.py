"""Regular expressions of an untrusted config, matched with names of an untrusted file in bounded time.

``re`` backtracks: ``(a+)+x`` takes 2^n steps for a name of n letters. Here a pattern that may take many is matched
by sets of positions instead. References to groups, possessive repetition and flags of groups are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["matches_start"]

_FEW = 1 << 21  # steps that ``re`` may take, some milliseconds
_STEPS = 1 << 16  # of sets of positions, which are slower; a name of 200 characters needs a few thousand
_MANY = 1 << 32
_LONGEST = 1 << 12  # characters of a pattern
_ATOM = re.compile(
    r"\\(?:x..|u....|U.{8}|N\{[^}]*\}|.)|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[(|)*+?{]|\{(?!(?=[\d,])\d*,?\d*\})", re.DOTALL
)
_TIMES = re.compile(r"(?:([*+?])|\{(?=[\d,])(\d*)(,?)(\d*)\})(\??)")
_OPEN = re.compile(r"\((?:\?(?:P<\w+>|:|(<?[=!])))?(?!\?)")


@dataclass
class _Name:
    text: str
    left: int = _STEPS

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise re.error(f"it takes too many steps on a name of {len(self.text)} characters")


_Ends = frozenset[int]
_Step = Callable[[_Name, _Ends], _Ends]  # where a part of the pattern may end, from where it may begin


@dataclass(frozen=True)
class _Part:
    step: _Step
    ways: Callable[[int], int]  # an upper bound of the ways to match it within a name of that length


def matches_start(pattern: str, name: str, *, whole: bool = False) -> bool:
    """Whether the pattern matches the start of a name, or the whole: as ``re.match`` and ``re.fullmatch`` say.

    Raises:
        re.error: not a regular expression, one that is not supported, or one that takes too many steps.
        RecursionError, OverflowError: of ``re``.
    """
    compiled, part = _parsed(pattern)
    if part.ways(len(name)) <= _FEW:
        return (compiled.fullmatch if whole else compiled.match)(name) is not None
    ends = part.step(_Name(name), frozenset((0,)))
    return len(name) in ends if whole else bool(ends)


@lru_cache(256)
def _parsed(pattern: str) -> tuple[re.Pattern[str], _Part]:
    if len(pattern) > _LONGEST:
        raise re.error(f"it has {len(pattern)} characters; at most {_LONGEST} are supported")
    compiled = re.compile(pattern)
    flags = re.match(r"\(\?[aiLmsux]+\)|", pattern)
    assert flags is not None
    if compiled.flags & re.VERBOSE:
        raise re.error("the flag x is not supported")
    return compiled, _Parser(pattern[flags.end() :], flags[0]).branches()


class _Parser:
    """A parser of expressions that ``re`` has accepted."""

    def __init__(self, text: str, flags: str) -> None:
        self.text, self.at, self.flags = text, 0, flags

    def branches(self) -> _Part:
        parts = [self.sequence()]
        while self.text[self.at : self.at + 1] == "|":
            self.at += 1
            parts.append(self.sequence())
        return parts[0] if len(parts) == 1 else _either(parts)

    def sequence(self) -> _Part:
        parts = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self.repeated(self.group() if self.text[self.at] == "(" else self.atom()))
        return _one_after_another(parts)

    def atom(self) -> _Part:
        found = _ATOM.match(self.text, self.at)
        if found is None or re.fullmatch(r"\\\d", found[0]):
            raise re.error("a reference to a group or another rare construct", self.text, self.at)
        self.at = found.end()
        return _atom(re.compile(self.flags + found[0]))

    def group(self) -> _Part:
        found = _OPEN.match(self.text, self.at)
        if found is None:
            raise re.error("this kind of group is not supported", self.text, self.at)
        begin, self.at = self.at, found.end()
        inner = self.branches()
        self.at += 1
        if found[1] is None:
            return inner
        behind = found[1][0] == "<"  # of a fixed width, so that re takes one way
        look = _atom(re.compile(self.flags + self.text[begin : self.at])).step if behind else _ahead(inner.step)
        return _Part(_but(look) if found[1] == "!" else look, inner.ways)

    def repeated(self, part: _Part) -> _Part:
        found = _TIMES.match(self.text, self.at)
        if found is None:
            return part
        self.at = found.end()
        if self.text[self.at : self.at + 1] == "+":
            raise re.error("possessive repetition is not supported", self.text, self.at)
        sign, low, comma, high = found[1], found[2], found[3], found[4]
        least = {"*": 0, "+": 1, "?": 0}[sign] if sign else int(low or 0)
        most = {"*": _MANY, "+": _MANY, "?": 1}[sign] if sign else int(high) if high else _MANY if comma else least
        return _times(part, least, most)


def _atom(compiled: re.Pattern[str]) -> _Part:
    def step(name: _Name, begins: _Ends) -> _Ends:
        name.spend(len(begins))
        found = (compiled.match(name.text, begin) for begin in begins)
        return frozenset(one.end() for one in found if one)

    return _Part(step, lambda length: 1)


def _ahead(step: _Step) -> _Step:
    return lambda name, begins: frozenset(begin for begin in begins if step(name, frozenset((begin,))))


def _but(look: _Step) -> _Step:
    return lambda name, begins: begins - look(name, begins)


def _either(parts: list[_Part]) -> _Part:
    def step(name: _Name, begins: _Ends) -> _Ends:
        return frozenset().union(*(part.step(name, begins) for part in parts))

    return _Part(step, lambda length: min(sum(part.ways(length) for part in parts), _MANY))


def _one_after_another(parts: list[_Part]) -> _Part:
    def step(name: _Name, begins: _Ends) -> _Ends:
        for part in parts:
            begins = part.step(name, begins) if begins else begins
        return begins

    return _Part(step, lambda length: _product(part.ways(length) for part in parts))


def _product(numbers: Iterable[int]) -> int:
    product = 1
    for number in numbers:
        product = min(product * number, _MANY)
    return product


def _times(part: _Part, least: int, most: int) -> _Part:
    def step(name: _Name, begins: _Ends) -> _Ends:
        limit = len(name.text) + 1  # more repetitions match nothing, or the same
        for _ in range(min(least, limit)):
            name.spend(1)
            begins = part.step(name, begins)
        ends = new = begins
        for _ in range(min(most - least, limit)):
            new = part.step(name, new) - ends
            if not new:
                break
            ends |= new
        return ends

    def ways(length: int) -> int:
        times, each = min(most, length + 1), part.ways(length)
        return times + 1 if each == 1 else _product([each + 1] * min(times, 33))

    return _Part(step, ways)
