"""Command lines of the package's own tools: one line for every mistake, dashes and underscores alike."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """`argparse` whose errors are one line with status 2, naming the nearest option where one is unknown."""

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Options of `argv`; exits with status 2 where they are wrong."""
        known, extra = self.parse_known_args([self._normal(word) for word in argv])
        if extra:
            options = [o for action in self._actions for o in action.option_strings]
            near = difflib.get_close_matches(extra[0].partition("=")[0], options, n=1)
            self.error(f"{extra[0]}: no such option" + (f"; did you mean {near[0]}?" if near else ""))
        return known

    def positive(self, name: str, default: int | None, text: str) -> None:
        """Adds an option that is a whole number >= 1."""

        def number(word: str) -> int:
            if not word.isdecimal() or int(word) < 1:
                raise argparse.ArgumentTypeError(f"{word!r} is no whole number >= 1")
            return int(word)

        self.add_argument(name, type=number, default=default, help=text)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)

    @staticmethod
    def _normal(word: str) -> str:
        name, equals, value = word.partition("=")
        return f"--{name[2:].replace('-', '_')}{equals}{value}" if word.startswith("--") else word
