"""Types and ranges of what files and people give: keys of JSON and GGUF tables, and options.

Files are written by many programs, by hand, and badly. A value of another type or size is refused where it is read,
with one line that names file, key, value and what is needed; beyond this border no type is checked again.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

SHOWN = 60  # characters of a value in a message
TOKEN = MOST = 2**31 - 1  # largest token id, and largest whole number, that an int32 holds


class ConfigError(ValueError):
    """A value that the user gave is wrong; the message is one line for the user."""


class _Shortened(reprlib.Repr):
    def __init__(self):
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = SHOWN
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 8


_SHORTENED = _Shortened()


def shown(value: Any) -> str:
    """Returns a value as messages show it: on one line, and at most `SHOWN` characters of it."""
    try:
        text = _SHORTENED.repr(value)
    except ValueError:  # Python writes out no number of more than 4300 digits
        return "a number of thousands of digits"
    text = " ".join(text.split()) if "\n" in text else text  # arrays; a text's own line ends are written \\n
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def whole(value: Any) -> TypeGuard[int]:
    """Returns whether a value is a whole number; true and false are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def real(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a number; true and false are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def switch(name: str, value: Any) -> None:
    """Raises ConfigError for a switch that is neither true, false nor None: a text such as "no" would count as true."""
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)}: give True, False or None")


class Fields:
    """A table out of a file, read key by key. A key that is null counts as absent, in every format that is read here.

    raw: the table. where: the file, for messages. inside: the keys that led here, each with a dot.

    Raises:
      ConfigError: `raw` is no table; and each method, where a value has another type or range, or is needed and absent.
    """

    def __init__(self, raw: Any, where: str, inside: str = ""):
        if not isinstance(raw, Mapping):
            what = f"{inside[:-1]} is {shown(raw)}; " if inside else ""
            raise ConfigError(f"{where}: {what}a JSON object is needed")
        self.raw, self.where, self.inside = raw, where, inside

    def wrong(self, key: str, need: str) -> ConfigError:
        """Returns the line about a key: where it is, its value, and what is needed."""
        return ConfigError(f"{self.where}: {self.inside}{key} is {shown(self.raw.get(key))}; {need}")

    def has(self, key: str) -> bool:
        """Returns whether a key is there, with another value than null."""
        return self.raw.get(key) is not None

    def off(self, key: str) -> bool:
        """Returns whether a key cannot switch anything on: absent, null, false, zero or empty."""
        value = self.raw.get(key)
        return value is None or value is False or value in ("", 0) or (isinstance(value, list | Mapping) and not value)

    def whole(self, key: str, low: int = 1, high: int = TOKEN, default: int | None = None) -> int:
        """Returns a whole number of a range; `default` where it is absent, which None refuses."""
        value = self._value(key, default)
        if not whole(value) or not low <= value <= high:
            bounds = f">= {low}" if high == TOKEN else f"in {low}..{high}"
            raise self.wrong(key, f"a whole number {bounds} is needed")
        return int(value)

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Returns a finite number of a range; `default` where it is absent, which None refuses."""
        value = self._value(key, default)
        if not real(value) or not low <= value <= high:  # not-a-number is in no range
            raise self.wrong(key, f"a number in {low:g}..{high:g} is needed")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Returns true or false; nothing else counts as either."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false is needed")
        return value

    def text(self, key: str, default: str | None = None, among: Collection[str] = ()) -> str:
        """Returns a text, one of `among` where some are named; `default` where it is absent, which None refuses."""
        value = self._value(key, default)
        if not isinstance(value, str) or (among and value not in among):
            raise self.wrong(key, f"use {', '.join(among)}" if among else "a text is needed")
        return value

    def wholes(self, key: str, low: int = 0, high: int = TOKEN) -> tuple[int, ...]:
        """Returns a list of whole numbers of a range, () where it is absent."""
        return self._list(key, f"a list of whole numbers in {low}..{high}", lambda x: whole(x) and low <= x <= high)

    def reals(self, key: str, low: float, high: float) -> tuple[float, ...]:
        """Returns a list of numbers of a range, () where it is absent."""
        values = self._list(key, f"a list of numbers in {low:g}..{high:g}", lambda x: real(x) and low <= x <= high)
        return tuple(map(float, values))

    def texts(self, key: str) -> tuple[str, ...]:
        """Returns a list of texts, () where it is absent."""
        return self._list(key, "a list of texts", lambda x: isinstance(x, str))

    def tables(self, key: str) -> tuple[Mapping[str, Any], ...]:
        """Returns a list of tables, () where it is absent."""
        return self._list(key, "a list of objects", lambda x: isinstance(x, Mapping))

    def ids(self, key: str, tokens: int = TOKEN + 1) -> tuple[int, ...]:
        """Returns ids of a vocabulary of `tokens`, where one or a list of them may stand; () where it is absent."""
        value: Any = self.raw.get(key)
        right = lambda x: whole(x) and 0 <= x < tokens
        return (int(value),) if right(value) else self._list(key, f"a token id in 0..{tokens - 1}, or a list,", right)

    def table(self, key: str) -> Fields:
        """Returns the table under a key, an empty one where it is absent."""
        value = self.raw.get(key)
        return Fields({} if value is None else value, self.where, f"{self.inside}{key}.")

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        return default if value is None else value

    def _list(self, key: str, need: str, right) -> tuple:
        value = self.raw.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise self.wrong(key, f"{need} is needed")
        odd = next((i for i, x in enumerate(value) if not right(x)), None)
        if odd is not None:
            name = f"{self.inside}{key}[{odd}]"
            raise ConfigError(f"{self.where}: {name} is {shown(value[odd])}; {need} is needed")
        return tuple(value)


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a request or of a command.

    name: of the flag, without dashes.
    kind: "whole", "number", "flag", "text", "choice", "texts" (given again for more), "ids" (1,2,3), "bias"
        (5:1.5,7:-2).
    help: a sentence for people.
    default: what holds where the option is not given.
    low, high: the ends of the range of a number; above: the lower end itself is not valid.
    off: which value does nothing, for people.
    choices: of a "choice"; of any other kind, words that may stand for a value.
    many: several values after one flag.
    required: there is no default.
    metavar: what help calls the value.
    """

    name: str
    kind: str
    help: str
    default: Any = None
    low: float | None = None
    high: float | None = None
    above: bool = False
    off: str = ""
    choices: tuple[str, ...] = ()
    many: bool = False
    required: bool = False
    metavar: str = ""

    def check(self, value: Any) -> None:
        """Raises ConfigError where a value has another type, or lies outside the range."""
        right, wanted = True, ""
        if self.kind != "choice" and isinstance(value, str) and value in self.choices:
            return
        if self.kind == "whole":
            low, high = int(self.low or 0), int(MOST if self.high is None else self.high)
            right = whole(value) and low <= value <= high
            wanted = f"a whole number {f'>= {low}' if high == MOST else f'in {low}..{high}'}"
        elif self.kind == "number":
            least, most = self.low or 0, math.inf if self.high is None else self.high
            right = real(value) and least <= value <= most and math.isfinite(value)
            right = right and not (self.above and value == least)
            start = f"{'>' if self.above else '>='} {least:g}"
            range_ = f"in {'(' if self.above else '['}{least:g}, {most:g}]"
            wanted = f"a finite number {start if most == math.inf else range_}"
        elif self.kind == "choice":
            right, wanted = isinstance(value, str) and value in self.choices, f"one of {', '.join(self.choices)}"
        elif self.kind == "flag":
            right, wanted = isinstance(value, bool), "true or false"
        if self.kind != "choice":
            wanted = " or ".join([wanted, *self.choices])
        if not right:
            raise ConfigError(f"{self.name}={shown(value)}: give {wanted}{f' ({self.off})' if self.off else ''}")


def option(kind: str, default: Any, help: str, name: str = "", **rest: Any) -> Any:
    """Returns a field of a configuration with its `Option`; name: of the flag, where it is not the field's."""
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help, "name": name, **rest})


def table(config: type) -> dict[str, Option]:
    """Returns the options of a configuration class, by the names of its fields."""
    found = {}
    for field in dataclasses.fields(config):
        if field.metadata:
            given = {**field.metadata, "name": field.metadata["name"] or field.name}
            found[field.name] = Option(default=field.default, **given)
    return found
