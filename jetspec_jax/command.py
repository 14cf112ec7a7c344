"""The command line of every entry point: options from one table, one line for every mistake, one set of statuses.

    LINE = command.Line(__doc__, [Option("batch", "whole", "Prompts decoded together.", 32, low=1), ...])

    @command.tool("audit")
    def main(argv):
        args = LINE.parse(argv)

`tool` makes `main(argv=None) -> status` of a function: what it raises becomes one line on stderr (`outcome.py`). A
file that is run says `outcome.start("jetspec_jax.audit")` at its top, before the slow imports, so that Ctrl-C is
answered from then on. Nothing here imports jax.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jetspec_jax import outcome
from jetspec_jax.fields import ConfigError, Option, shown, table
from jetspec_jax.options import BACKENDS, DTYPES, SamplingConfig, TreeConfig, mesh_axes

SAMPLING, TREE = table(SamplingConfig), table(TreeConfig)
DTYPE = Option("dtype", "choice", "Dtype of the weights. Default: the file's.", choices=DTYPES)
BACKEND = Option(
    "backend", "choice",
    "What computes a layer (--attention is the same): pallas our kernels, the others XLA's with their attention. "
    "auto: pallas for 16-bit weights on a Hopper GPU, else xla. pallas without a GPU runs in an interpreter: right, "
    "and slow.",
    "auto", choices=BACKENDS,
)  # fmt: skip
MESH = Option(
    "mesh", "text",
    "Devices that share the work (docs/devices.md), e.g. data=2,model=4: two groups of four, each with half of the "
    "rows, its four sharing the weights; expert=N for experts apart. Default: one device.",
    metavar="AXIS=N,...",
)  # fmt: skip
TARGET = Option("target", "text", "Target: a folder, a .gguf file or a hub id. Default: the demo target.")
HEAD = Option("head", "text", "Draft head: a folder or a hub id. Default with the demo target: the demo head.")
THINKING = Option(
    "thinking", "flag",
    "Let the chat template leave room for thinking. Default: as the head was trained (its jetspec.json), else off.",
)  # fmt: skip
JSON = Option("json", "flag", "Print one JSON object.", False)
PROMPTS = Option(
    "prompts", "text", "Prompt files, as of decode.py --prompt_file.", many=True, required=True, metavar="FILE"
)
LIMIT = Option("limit", "whole", "Prompts of each file.", 128, low=1)
MAX_PROMPT_TOKENS = Option("max_prompt_tokens", "whole", "Longer prompts are left out.", 256, low=1)
BATCH = Option("batch", "whole", "Prompts decoded together.", 32, low=1)
ALIASES = {"attention": "backend"}  # where a command has the second
SWITCH = {"true": True, "on": True, "1": True, "yes": True, "false": False, "off": False, "0": False, "no": False}


class UsageError(ConfigError):
    """The options alone are wrong; the message is one line."""


def tool(name: str, full: str = "", after: str = "") -> Callable[[Callable[[Sequence[str]], int]], Callable[..., int]]:
    """Makes `main(argv=None) -> status` of a function that takes the words after the command's name.

    name: what its error lines begin with. full: what helps where a device is full. after: what it says of itself once
    it was interrupted.
    """

    def wrap(work: Callable[[Sequence[str]], int]) -> Callable[..., int]:
        @functools.wraps(work)
        def main(argv: Sequence[str] | None = None) -> int:
            words = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
            return outcome.run(outcome.installed() or name, lambda: work(words), full, after)

        return main

    return wrap


class Args(argparse.Namespace):
    """Values by the names of their options; `given` holds the names that the words had."""

    given: set[str]


def settings(args: Args) -> dict[str, Any]:
    """Returns the values as a plain dict, for a report."""
    return {name: value for name, value in vars(args).items() if name != "given"}


def tree_of(args: Args) -> TreeConfig:
    """Returns the tree that the options of `TreeConfig` describe."""
    return _make(args, TreeConfig, TREE)


def sampling_of(args: Args) -> SamplingConfig:
    """Returns what the options of `SamplingConfig` describe; the command's budget is the tree's alone."""
    return _make(args, SamplingConfig, {name: o for name, o in SAMPLING.items() if name != "budget"})


def _make(args: Args, kind: type, options: dict[str, Option]) -> Any:
    values = {field: getattr(args, option.name) for field, option in options.items() if hasattr(args, option.name)}
    try:
        return kind(**values)
    except ConfigError as error:
        raise UsageError(f"--{error}") from None


def writable(name: str, path: str | None) -> None:
    """Notices a file that cannot be written before the work, and leaves nothing where nothing was.

    Raises:
      ConfigError: the line names the option, `name`.
    """
    if path is None:
        return
    new = not os.path.lexists(path)
    try:
        open(path, "ab").close()
    except OSError as error:
        raise ConfigError(f"{name}={shown(path)}: it cannot be written ({error.strerror}); name another") from None
    if new:
        os.unlink(path)


def check_mesh(given: str | None) -> None:
    """Raises UsageError where the words after --mesh cannot be read."""
    try:
        mesh_axes(given) if given is not None else None
    except ConfigError as error:
        raise UsageError(f"--{error}") from None


def pair_of(args: Args) -> tuple[Any, Any]:
    """Loads target and head, the demo's where neither is named.

    Raises:
      UsageError: one of them is named.
    """
    for name, other in (("head", "target"), ("target", "head")):
        if getattr(args, name) and not getattr(args, other):
            raise UsageError(f"--{name} without --{other}: name both, or neither for the demo pair")
    from jetspec_jax.files import demo, load

    target = load.load_target(args.target or demo.fetch_target(), args.dtype, args.backend)
    return target, load.load_head(args.head or demo.head_folder(), target)


class Line:
    """The options of one command: reads words, and writes the help.

    doc: what the help begins with; without docstrings (python -OO) it still lists every option. hint: what a word that
    is no option should rather be.
    """

    def __init__(
        self, doc: str | None, options: Iterable[Option], positional: Iterable[Option] = (), hint: str = ""
    ):  # fmt: skip
        self._doc, self._hint = (doc or "").strip(), hint or "--help lists the options"
        self.options = {option.name: option for option in options}
        self.positional = {option.name: option for option in positional}

    def parse(self, argv: Sequence[str]) -> Args:
        """Returns the options that the words give.

        Raises:
          UsageError: a word is no option (the nearest is named), or a value does not fit.
          SystemExit: help was asked for, and printed.
        """
        found, loose = self._read(list(argv))
        if len(loose) > len(self.positional):
            raise UsageError(f"{shown(loose[len(self.positional)])}: unexpected argument; {self._hint}")
        found |= {name: [word] for name, word in zip(self.positional, loose, strict=False)}
        args = Args(given={name for name in self.options if name in found})
        for name, option in (self.positional | self.options).items():
            mark = "" if name in self.positional else "--"
            if option.required and name not in found:
                label = f"--{name}" if mark else option.metavar or name.upper()
                raise UsageError(f"{label} is missing; --help lists the options")
            try:
                setattr(args, name, _value(option, found[name]) if name in found else _default(option))
            except ConfigError as error:
                raise UsageError(f"{mark}{error}") from None
        return args

    def _read(self, words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
        """The words of every option, and those that belong to none. No value is taken for an option."""
        found: dict[str, list[str]] = {}
        loose: list[str] = []
        while words:
            word = words.pop(0)
            if word in ("-h", "--help"):
                print(self.help())
                raise SystemExit(0)
            if not word.startswith("--") or word == "--":
                loose.append(word)
                continue
            given, equals, value = word[2:].partition("=")
            name, negated = self._name(given)
            option = self.options[name]
            if negated and equals:
                raise UsageError(f"--{given}={shown(value)}: it takes no value; leave the value out")
            if negated or (option.kind == "flag" and not equals):
                follows = not negated and words and not words[0].startswith("-") and not self.positional
                values = [words.pop(0) if follows else str(not negated)]
            elif equals:
                values = [value]
            else:
                count = 1
                while option.many and count < len(words) and not words[count].startswith("--"):
                    count += 1
                values, words = words[:count], words[count:]
            if not values:
                raise UsageError(f"--{name}: a value is missing")
            found[name] = (found.get(name, []) if option.kind == "texts" else []) + values
        return found, loose

    def _name(self, given: str) -> tuple[str, bool]:
        """The option that a word means, and whether it is negated."""
        name = given.replace("-", "_")
        name = ALIASES[name] if name not in self.options and ALIASES.get(name) in self.options else name
        if name in self.options:
            return name, False
        plain = re.sub("^no_?", "", name)
        if plain in self.options and self.options[plain].kind == "flag":
            return plain, True
        known = [*self.options, *(f"no{n}" for n, option in self.options.items() if option.kind == "flag")]
        near = difflib.get_close_matches(name[:80], known, n=1)
        hint = f"did you mean --{near[0]}?" if near else "--help lists the options"
        raise UsageError(f"--{shown(given)[1:-1]}: no such option; {hint}")

    def help(self) -> str:
        """Returns the text of --help."""
        parser = argparse.ArgumentParser(
            usage=argparse.SUPPRESS, description=self._doc, formatter_class=_Format, allow_abbrev=False
        )
        for name, option in self.positional.items():
            parser.add_argument(name, help=_help(option), metavar=option.metavar or name.upper())
        for name, option in self.options.items():
            metavar = (option.metavar or _metavar(option)) + (" ..." if option.many else "")
            parser.add_argument(f"--{name}", help=_help(option), metavar=metavar)
        return parser.format_help()


class _Format(argparse.RawDescriptionHelpFormatter):
    """Help that names the two forms of a flag."""

    def _format_action_invocation(self, action):
        return f"--[no]{action.dest}" if action.metavar == "FLAG" else super()._format_action_invocation(action)


def sampling(*without: str) -> list[Option]:
    """Returns the options of a request that stand beside those of the tree, but for some."""
    return [option for name, option in SAMPLING.items() if name not in (*without, "budget")]


def _help(option: Option) -> str:
    known = [f"One of {', '.join(option.choices)}." if option.kind == "choice" else ""]
    if option.off:
        known.append(f"{option.off[0].upper()}{option.off[1:]}.")
    if option.default not in (None, (), False, ""):
        given = option.default if not isinstance(option.default, list | tuple) else " ".join(map(str, option.default))
        known.append(f"Default: {given}.")
    return " ".join([option.help, *filter(None, known)]).replace("%", "%%")


def _metavar(option: Option) -> str:
    names = {"whole": "N", "number": "X", "flag": "FLAG", "ids": "ID,...", "bias": "ID:X,...", "choice": "NAME"}
    name = names.get(option.kind, "TEXT")
    return name if option.kind == "choice" else "|".join([name, *option.choices])


def _default(option: Option) -> Any:
    return list(option.default) if isinstance(option.default, tuple) else option.default


def _value(option: Option, words: list[str]) -> Any:
    """What the words of an option mean; checked."""
    if option.kind == "texts":
        return words
    return [_one(option, word) for word in words] if option.many else _one(option, words[-1])


def _one(option: Option, text: str) -> Any:
    value: Any = text
    if option.kind == "whole" and re.fullmatch(r"[+-]?[0-9]{1,30}", text):
        value = int(text)
    elif option.kind == "number" and not re.search(r"[_\s]", text):
        try:
            value = float(text)
        except ValueError:
            value = text
    elif option.kind == "flag":
        value = SWITCH.get(text.lower(), text)
    elif option.kind == "ids":
        return ids(option.name, text)
    elif option.kind == "bias":
        return bias(option.name, text)
    elif option.kind == "text" and not text:
        raise ConfigError(f"{option.name}='': the value is empty; name it, or leave the option out")
    option.check(value)
    return value


def ids(name: str, text: str) -> list[int]:
    """Reads token ids out of "1,2,3"."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,10}", word) for word in words):
        raise ConfigError(f"{name}={shown(text)}: give whole numbers (token ids) with commas, e.g. 1,2,3")
    return [int(word) for word in words]


def bias(name: str, text: str) -> dict[int, float]:
    """Reads {id: number} out of "5:1.5,7:-2"."""
    pairs = [word.split(":") for word in text.split(",")]
    try:
        found = {ids(name, token)[0]: float(number) for token, number in pairs}
    except ValueError:
        found = {}
    if len(found) != len(pairs):
        raise ConfigError(f"{name}={shown(text)}: give each id once, as TOKEN_ID:NUMBER,... e.g. 5:1.5,7:-2")
    return found


def markdown(config: type) -> str:
    """Returns the options of a configuration class as a table for docs/options.md."""
    lines = ["| option | default | range | |", "| --- | --- | --- | --- |"]
    for option in table(config).values():
        limit = ", ".join(option.choices)
        if option.kind in ("whole", "number"):
            end = "" if option.high is None else f"{option.high:g}"
            limit = f"{'>' if option.above else '>='} {option.low or 0:g}" + (f", <= {end}" if end else "")
            limit = ", ".join([limit, *option.choices])
        default = "" if option.default in (None, ()) else str(option.default).lower()
        text = option.help + (f" {option.off[0].upper()}{option.off[1:]}." if option.off else "")
        lines.append(f"| `{option.name}` | {default} | {limit} | {text} |")
    return "\n".join(lines)
