"""Command lines of the package's own tools: one line for every mistake, dashes and underscores alike."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Sequence
from typing import NoReturn

from jetspec_jax.options import ConfigError, SamplingConfig


def ids(name: str, value: str | None) -> list[int]:
    """Token ids out of "1,2,3"; none for None."""
    words = [] if value is None else value.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"{name}={value!r}: give whole numbers with commas, e.g. 1,2,3")
    return [int(word) for word in words]


def bias(value: str | None) -> dict[int, float]:
    """{id: number} out of "5:1.5,7:-2"; nothing for None."""
    words = [] if value is None else value.split(",")
    try:
        found = {int(token): float(number) for token, number in (word.split(":") for word in words)}
    except ValueError:
        found = {}
    if len(found) != len(words):
        raise ConfigError(f"logit_bias={value!r}: give each id once, as TOKEN_ID:NUMBER,... e.g. 5:1.5,7:-2")
    return found


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

    def sampling(self) -> None:
        """Adds the options that choose tokens, under the names of `SamplingConfig`; `sampling_of` reads them."""
        usual = SamplingConfig()
        penalties = "repetition_penalty", "presence_penalty", "frequency_penalty"
        for name in ("temperature", "top_p", "min_p", *penalties):
            self.add_argument(f"--{name}", type=float, default=getattr(usual, name), help="as of decode.py")
        for name in ("seed", "top_k", "min_new_tokens"):
            self.add_argument(f"--{name}", type=int, default=getattr(usual, name), help="as of decode.py")
        self.add_argument("--logit_bias", metavar="ID:NUMBER,...", help="as of decode.py")
        self.add_argument("--stop_token_ids", metavar="ID,...", help="as of decode.py")
        self.add_argument("--bad_words", action="append", default=[], help="as of decode.py; repeatable")
        self.add_argument("--ignore_eos", action="store_true", help="as of decode.py")

    def sampling_of(self, args: argparse.Namespace) -> SamplingConfig:
        """What `sampling` added, and `max_new_tokens`; exits with status 2 where a value is wrong."""
        words = {"logit_bias", "stop_token_ids"}
        same = {field.name for field in dataclasses.fields(SamplingConfig)} - words - {"budget"}
        try:
            return SamplingConfig(
                **{name: value for name, value in vars(args).items() if name in same},
                logit_bias=bias(args.logit_bias),
                stop_token_ids=ids("stop_token_ids", args.stop_token_ids),
            )
        except ConfigError as error:
            self.error(f"--{error}")

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)

    @staticmethod
    def _normal(word: str) -> str:
        name, equals, value = word.partition("=")
        return f"--{name[2:].replace('-', '_')}{equals}{value}" if word.startswith("--") else word
