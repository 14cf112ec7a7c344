"""Final answers of mathematics, out of a text: found, brought to one form, and compared.

An answer is compared as a number where both sides are one, else as a list, interval or set of such, else as text in one
spelling. Nothing is computed beyond that: `x + 1` and `1 + x` differ. What has no answer in it is None, which a report
counts apart from what is wrong.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

NUMBER = r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])-?\.\d+"
UNITS = (
    "degrees?|dollars?|cents?|inch(?:es)?|feet|foot|ft|yards?|miles?|hours?|minutes?|seconds?|days?|weeks?|months?|"
    "years?|units?|square|cubic|points?|meters?|metres?|centimeters?|kilometers?|grams?|kilograms?|liters?|litres?|"
    "cm|mm|km|kg|mph|percent"
)
WORDS = rf"(?:{UNITS})(?:\s+(?:{UNITS}))*"
POWER = r"(?:\s*\^\s*\{?[23]\}?)?"
UNIT = (  # after a number, at the end
    rf"(?<=[\d}}])\s*(?:\\(?:text|mathrm|mbox)\s*\{{\s*{WORDS}\s*{POWER}\s*\}}|(?<![a-zA-Z\\]){WORDS}){POWER}\s*$"
)
LONGEST = 1000  # digits of a number


def boxed(text: str) -> str | None:
    r"""Returns what the last \boxed{...} (or \fbox) of a text holds, its braces balanced; None without a whole one."""
    found: str | None = None
    latest, open_ = -1, list[tuple[bool, int]]()  # of every open brace: whether it is a box's, and what follows it
    for match in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", text, re.S):
        if match[0] == "\\{" or (match[0].startswith("\\") and not match[0].endswith("{")):
            continue  # an escaped brace, or another command
        if match[0] != "}":
            open_.append((match[0] != "{", match.end()))
        elif open_:
            boxes, start = open_.pop()
            if boxes and start > latest:
                found, latest = text[start : match.start()], start
    bare = re.findall(r"\\boxed\s+([^\s${]+)", text) if found is None else []
    return bare[-1] if bare else found


def final(text: str) -> str | None:
    """Returns the final answer that a text gives: boxed, after `####`, or after "answer is"; None without one."""
    if (inside := boxed(text)) is not None:
        return inside.strip() or None
    for pattern in (r"####[ \t]*([^\n]+)", r"(?i)\banswer(?:\s+is\b|\s*:)[ \t*:]*([^\n]+)"):
        if found := re.findall(pattern, text):
            line = re.split(r"\.(?:\s|$)", found[-1].strip())[0].strip(" *$")
            return line or None
    return None


def numbers(text: str) -> list[str]:
    """Returns the numbers of a text, in its order."""
    return re.findall(NUMBER, text)


SPELLINGS: list[tuple[str, Any]] = [  # (what is found, what it becomes), in this order
    (r"\u2212", "-"),
    (r"\\?\$", ""),
    (r"\\!", ""),  # between the thousands of a number
    (r"\\[,;: ]|\\q?quad(?![a-zA-Z])|~", " "),
    (r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr|displaystyle)(?![a-zA-Z])\s*", ""),
    (r"\\\{", "{:"),  # braces of a set are not those of a group
    (r"\\\}", ":}"),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\degree(?![a-zA-Z])|°", ""),
    (r"\\?%", ""),
    (UNIT, ""),
    (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1"),
    (r"\\frac\s*([0-9])\s*([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\{[^{}]*\})\s*([0-9])(?![0-9])", r"\\frac\1{\2}"),
    (r"\\frac\s*([0-9])\s*(?=\{)", r"\\frac{\1}"),
    (r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
    (r"([_^])\{(\w)\}", r"\1\2"),
    (r"\\(?:times|cdot)(?![a-zA-Z])", "*"),
    (r"(?<=[0-9])\s*(?=\\frac)", "&"),  # a whole number and its fraction
    (r"^\s*[a-zA-Z]\s*(?:=(?!=)|\\in(?![a-zA-Z]))", ""),  # x = 5
    # Commas of thousands; with a space after them it is a list.
    (r"^\s*[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?\s*$", lambda found: found[0].replace(",", "")),
    (r"\s+", ""),
    (r"^\(([A-Z])\)$", r"\1"),  # a choice
]  # fmt: skip


def normal(answer: str) -> str:
    """Returns an answer in one spelling: without LaTeX of layout, units, separators of thousands, and spaces."""
    text = answer.strip().rstrip(".").strip()
    for pattern, spelling in SPELLINGS:
        text = re.sub(pattern, spelling, text)
    return text


def value(text: str) -> Fraction | None:
    """Returns the number that a normal text is, exactly; None where it is none."""
    sign = -1 if text.startswith("-") else 1
    bare = text.removeprefix("-").removeprefix("+")
    if mixed := re.fullmatch(r"(\d+)&(\\frac\{\d+\}\{\d+\})", bare):
        part = value(mixed[2])
        return None if part is None else sign * (int(mixed[1]) + part)
    if re.fullmatch(r"\d+(?:\.\d*)?|\.\d+", bare) and len(bare) < LONGEST:
        return sign * Fraction(bare)
    parts = re.fullmatch(r"\\frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}|([\d.]+)/(-?[\d.]+)", bare)
    if parts is None:
        return None
    over, under = (value(part) for part in (parts[1] or parts[3], parts[2] or parts[4]))
    return sign * over / under if over is not None and under else None


def same(one: str, other: str) -> bool:
    """Returns whether two answers are the same, as they stand or in one spelling."""
    return _same(normal(one), normal(other))


def _same(one: str, other: str) -> bool:
    if one == other:
        return True
    numbers = value(one), value(other)
    if None not in numbers:
        return numbers[0] == numbers[1]
    pieces, others = _pieces(one), _pieces(other)
    if pieces is None or others is None or pieces[0] != others[0] or len(pieces[1]) != len(others[1]):
        return False
    if pieces[0] in ("", "{::}"):  # a list or set has no order
        left = list(others[1])
        for piece in pieces[1]:
            found = next((item for item in left if _same(piece, item)), None)
            if found is None:
                return False
            left.remove(found)
        return True
    return all(map(_same, pieces[1], others[1]))


def _pieces(text: str) -> tuple[str, list[str]] | None:
    """The brackets of a tuple, interval, set or list, and what stands between its commas; None for a single thing."""
    brackets = ""
    for first, last in (("{:", ":}"), ("(", ")"), ("(", "]"), ("[", ")"), ("[", "]")):
        if text.startswith(first) and text.endswith(last) and _closes(text, len(first), len(text) - len(last)):
            brackets, text = first + last, text[len(first) : -len(last)]
            break
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return (brackets, parts) if len(parts) > 1 else None


def _closes(text: str, first: int, last: int) -> bool:
    """Whether what stands inside the outer brackets is whole by itself."""
    depth = 0
    for letter in text[first:last]:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return False
    return not depth
