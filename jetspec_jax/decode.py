"""Decodes prompts with a target and a draft; the output equals plain decoding.

    jetspec-decode --prompt "Write a sorting function."       the demo pair, on whatever device there is
    jetspec-decode --prompt "..." --compare                   also decode plainly: same tokens, both rates
    jetspec-decode --prompt "..." --show_tree                 the tree of the first round
    jetspec-decode --target DIR --head DIR --prompt_file prompts.jsonl --batch 8 --json
    jetspec-decode --chat                                     a conversation, a line of standard input a turn

`python decode.py` in a checkout is the same. Text or JSON goes to stdout, everything else to stderr. Exit status: 0
done, 2 the options are wrong, 1 the files or the run are, 130 interrupted.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from jetspec_jax import command, hosts, methods, outcome
from jetspec_jax.command import SAMPLING, TREE, Option, UsageError
from jetspec_jax.methods import METHODS
from jetspec_jax.options import AUTO, ConfigError, SamplingConfig, TreeConfig, shown

PROMPTS = ("prompt", "prompt_ids", "prompt_file")
DRAWN = ("trace", "show_tree", "tree_svg")  # what is recorded round by round

LINE = command.Line(
    __doc__,
    [
        command.TARGET,
        command.HEAD,
        Option(
            "method", "choice",
            f"{'; '.join(f'{name}: {method.help}' for name, method in METHODS.items())}. Default: the head's family; "
            "where --budget, --width or --tree ask a chain's head for a tree, jetspec (dflash) or pctree (dspark).",
            choices=tuple(METHODS),
        ),
        Option("prompt", "text", "Prompt text."),
        Option("prompt_ids", "ids", "Prompt as token ids, e.g. 1,2,3; for checkpoints without a tokenizer too."),
        Option(
            "prompt_file", "text",
            'JSONL: {"prompt": ...}, {"messages": [...]} or {"prompt_ids": [...]} a line; optional id, thinking, and '
            f"options of its own: {', '.join(SAMPLING)}.",
            metavar="FILE",
        ),
        Option("batch", "whole", "Prompts of --prompt_file decoded together; their output keeps its order.", 1, low=1),
        *TREE.values(),
        *command.sampling(),
        Option(
            "chat", "flag",
            "Put the prompt through the chat template (default: where there is one). Without a prompt: talk by lines.",
        ),
        command.THINKING,
        Option(
            "prefill_chunk", "whole",
            "Prompt tokens read at a time; memory grows with it, not with the prompt. Default: 512.", low=1,
        ),
        Option("stream", "flag", "Print text as it comes. Default: yes, unless --json, --batch or a trace."),
        command.DTYPE,
        command.BACKEND,
        command.MESH,
        *hosts.OPTIONS,
        Option(
            "xla_flags", "choice",
            "tested: add the XLA flags that were measured with the installed jaxlib (docs/performance.md); print: "
            "show them.",
            "none", choices=("none", "tested", "print"),
        ),
        Option("compare", "flag", "Also decode plainly; report whether the tokens are equal, and both rates.", False),
        Option("show_tree", "flag", "Draw the tree of a round, with the accepted path and the probabilities.", False),
        Option("tree_svg", "text", "The same as a picture in this file.", metavar="FILE.svg"),
        Option("tree_round", "whole", "Which round they show.", 1, low=1),
        Option("trace", "text", "Store every round's draft logits, tree and accepted path in this .npz file.",
               metavar="FILE"),
        Option("profile", "text", "Decode once more, compiled, and write a profiler trace of it into this folder.",
               metavar="DIR"),
        Option("json", "flag", "Print one JSON object a prompt instead of text.", False),
    ],
    hint="a prompt goes after --prompt",
)  # fmt: skip


@command.tool(
    "decode.py",
    "end other programs, set XLA_PYTHON_CLIENT_MEM_FRACTION, or take a smaller --max_new_tokens, --budget or --batch",
)
def main(argv: Sequence[str]) -> int:
    """Parses, decodes, prints; returns the exit status."""
    args = LINE.parse(argv)
    from jetspec_jax.files import xla

    try:
        if args.xla_flags == "print":
            print(*xla.tested_flags(), sep="\n")
            return 0
        if args.xla_flags == "tested":
            xla.apply_flags()
    except ConfigError as error:
        raise UsageError(f"--{error}") from None
    _check(args)
    hosts.join(args)
    if _talks(args):
        return _talk(args)
    tree, sampling = command.tree_of(args), command.sampling_of(args)
    rows = _rows(args)
    for name in ("trace", "tree_svg"):
        command.writable(name, getattr(args, name))
    _writable_folder(args.profile)
    run = _load(args, tree, any("budget" in row.options for row in rows))
    _say(f"decoding on {_device()}; programs that are new to this machine are compiled first")
    jobs = _jobs(run, rows, sampling)  # all are checked before the first is decoded
    broken = 0
    for first in range(0, len(jobs), args.batch):
        broken += _decode(run, jobs[first : first + args.batch])
    return 1 if broken else 0


def _check(args: command.Args) -> None:
    """Raises UsageError where options contradict each other."""

    def refuse(wrong: Any, text: str) -> None:
        if wrong:
            raise UsageError(text)

    prompts = [name for name in PROMPTS if name in args.given]
    if _talks(args):
        refuse(args.budget == AUTO, "--chat without a prompt talks with trees of one size; give --budget a number")
        for name in (
            *DRAWN, "json", "compare", "profile", "batch", "prefill_chunk", "stream", "logprobs", "budget_rule",
            "prune", "mesh", "coordinator",
        ):  # fmt: skip
            refuse(name in args.given, f"--chat without a prompt talks, and --{name} is not for that; leave it out")
        prompts = ["chat"]
    got = f"{' and '.join(f'--{p}' for p in prompts)} together" if prompts else "no prompt"
    refuse(len(prompts) != 1, f"{got}: give one of --prompt, --prompt_ids, --prompt_file")
    for name in METHODS[args.method].refused if args.method else ():
        refuse(name in args.given, f"--{name} contradicts --method {args.method}; leave one of them out")
    headless = args.method is not None and not METHODS[args.method].head
    no_head = args.target is not None and args.head is None and not headless
    refuse(no_head, "--target without --head: name the head, or use --method ngram or autoregressive")
    several = args.prompt_file is not None
    recorded = next((name for name in DRAWN if getattr(args, name)), None)
    refuse(recorded and several, f"--{recorded} with --prompt_file: it shows one prompt; use --prompt or --prompt_ids")
    refuse("batch" in args.given and not several, "--batch without --prompt_file: there is one prompt; leave it out")
    drawn = args.show_tree or args.tree_svg
    refuse("tree_round" in args.given and not drawn, "--tree_round without --show_tree or --tree_svg: add one of them")
    refuse(args.trace and args.trace == args.tree_svg, "--trace and --tree_svg name one file; give each its own")
    other = "json" if args.json else "trace" if args.trace else "batch" if args.batch > 1 else None
    refuse(args.stream and other, f"--stream contradicts --{other}; leave one of them out")
    refuse(args.logprobs and not args.json, "--logprobs without --json: only the JSON object has room for them; add it")
    ids = args.prompt_ids is not None
    said = lambda name: f"--{name}" if getattr(args, name) else f"--no{name}"
    refuse(ids and args.chat is not None, f"{said('chat')} with --prompt_ids: ids are taken as they are; leave it out")
    command.check_mesh(args.mesh)
    hosts.check(args)
    refuse(args.coordinator and not args.mesh, "--coordinator without --mesh: say how the devices share the work")
    several = args.coordinator is not None
    refuse(several and args.budget == AUTO, "--budget auto with --coordinator: hosts differ in time; give a number")
    refuse(
        several and recorded, f"--{recorded} with --coordinator: one process draws and stores; leave one of them out"
    )
    unused = "--nochat" if args.chat is False else "--prompt_ids"
    asked = args.thinking is not None and (ids or args.chat is False)
    refuse(asked, f"{said('thinking')} with {unused}: no chat template is used; leave it out")


def _talks(args: command.Args) -> bool:
    """Whether the command is a conversation."""
    return args.chat is True and not any(name in args.given for name in PROMPTS)


def _talk(args: command.Args) -> int:
    """Holds a conversation; returns the exit status."""
    from jetspec_jax import talk
    from jetspec_jax.serve import memory

    memory.keep_pages()
    tree, sampling = command.tree_of(args), command.sampling_of(args)
    run = _load(args, tree, False)
    _say(f"compiling for {_device()}; a line is a turn, and the end of the input ends the talk")
    return talk.run(talk.Talk(run.target, run.head, run.tree, sampling, args.thinking))


def _rows(args: command.Args) -> list[Any]:
    """The prompts as rows of a prompt file; one for a prompt of the command line."""
    from jetspec_jax.files import prompts

    if args.prompt_file is None:
        return [prompts.PromptRow("", args.prompt if args.prompt_ids is None else args.prompt_ids)]
    rows = prompts.read(args.prompt_file, tuple(SAMPLING))
    for row in rows:
        for name in METHODS[args.method].refused if args.method else ():
            if name in row.options:
                raise ConfigError(f"{row.where}: {name} contradicts --method {args.method}; leave one of them out")
        if row.options.get("logprobs") and not args.json:
            raise ConfigError(
                f"{row.where}: logprobs without --json: only the JSON object has room for them; add --json"
            )
    return rows


class Run(NamedTuple):
    """What all prompts of a command share. head: None for plain decoding."""

    args: command.Args
    target: Any
    head: Any
    tree: TreeConfig
    method: str


def _load(args: command.Args, tree: TreeConfig, asked: bool) -> Run:
    """Loads target and head; the method where none is given is the head's family.

    asked: whether a row asks for a budget of its own.
    """
    from jetspec_jax.files import demo, load

    path = args.target or demo.fetch_target()
    _say(outcome.cut(f"loading {args.target or 'the demo target'}"))
    target = load.load_target(path, args.dtype, args.backend, mesh=args.mesh)
    if args.method and not METHODS[args.method].head:
        drafter = METHODS[args.method].drafter
        return Run(args, target, load.load_drafter(drafter, target) if drafter else None, tree, args.method)
    head = load.load_head(args.head or demo.head_folder(), target)
    name = args.method or methods.usual(head, asked or bool({"budget", "width", "tree"} & args.given))
    return Run(args, target, head, methods.tree(name, tree, head), name)


class Job(NamedTuple):
    """One prompt, ready to be decoded. where: file and line. thinking: the mode that it was rendered in."""

    where: str
    id: Any
    ids: list[int]
    sampling: SamplingConfig
    thinking: bool | None


def _jobs(run: Run, rows: Sequence[Any], sampling: SamplingConfig) -> list[Job]:
    """Token ids and options of all prompts; each fits the target."""
    from jetspec_jax import speculate
    from jetspec_jax.files import pair, prompts

    args, target = run.args, run.target
    rendered = args.chat is not False and any(row.rendered for row in rows)
    usual = pair.thinking(target, run.head, args.thinking) if rendered else None
    jobs = []
    for row in rows:
        mode = row.mode(usual)
        if not row.where:
            ids = prompts.prompt_ids(target, row.prompt, args.chat, mode)
            speculate.check(target, ids, sampling)
            return [Job("", None, ids, sampling, mode)]
        own = row.sampling(sampling)
        ids = row.encode(target, usual, args.chat)
        try:
            speculate.check(target, ids, own)
        except ConfigError as error:
            raise ConfigError(f"{row.where}: {error}") from None
        jobs.append(Job(row.where, row.id, ids, own, mode))
    return jobs


def _decode(run: Run, jobs: Sequence[Job]) -> int:
    """Decodes some prompts together and prints what is asked for; returns how many ended with an error.

    A row that ends so is printed like its mates, in its place, and does not keep the next ones from being decoded.
    """
    import jax

    from jetspec_jax import baseline, speculate

    args, chunk = run.args, {"prefill_chunk": run.args.prefill_chunk}
    prompts, options = [job.ids for job in jobs], [job.sampling for job in jobs]
    recorded = bool(args.show_tree or args.tree_svg or args.trace)
    streamed = args.stream is not False and not args.json and not recorded and args.batch == 1
    if recorded:
        results = [_recorded(run, jobs[0])]
    elif streamed:
        results = [_streamed(run, jobs[0])]
    else:
        results = speculate.start(run.target, run.head, prompts, run.tree, options, **chunk).finish()
    if args.profile:
        with jax.profiler.trace(args.profile):
            speculate.start(run.target, run.head, prompts, run.tree, options, **chunk).finish()
    plain: Sequence[Any] = [None] * len(jobs)
    if args.compare:
        plain = speculate.start(run.target, None, prompts, None, options, **chunk).finish()
    for job, result, other in zip(jobs, results, plain, strict=True):
        result.settings["thinking"] = job.thinking  # the prompt was rendered here
        sound = other and not (result.error or other.error)
        report = baseline.compare(run.target, job.ids, other, result, job.sampling) if sound else None
        if args.json:
            extra = ({"id": job.id} if job.id is not None else {}) | ({"compare": report} if report else {})
            print(json.dumps(result.to_json() | {"method": run.method, "prompt_ids": job.ids} | extra), flush=True)
        else:
            print("" if streamed else result.text, flush=True)
            _summary(result, other, report)
        if result.error:
            _say(f"{outcome.installed() or 'decode.py'}: {job.where and f'{job.where}: '}{result.error}")
    return sum(result.error is not None for result in results)


def _streamed(run: Run, job: Job) -> Any:
    """Prints the text of one prompt as it comes, and returns the result."""
    from jetspec_jax import speculate

    engine = speculate.start(
        run.target, run.head, [job.ids], run.tree, job.sampling, watch=True, prefill_chunk=run.args.prefill_chunk
    )
    for piece in speculate.pieces(engine):
        print(piece.text, end="", flush=True)
    return piece.result


def _recorded(run: Run, job: Job) -> Any:
    """Decodes round by round; draws and stores what is asked for, and returns the result."""
    from jetspec_jax.evals import draw, trace

    args, number = run.args, run.args.tree_round
    rounds, result = trace.record(
        run.target, run.head, job.ids, run.tree, job.sampling, args.prefill_chunk, number
    )  # fmt: skip
    if args.trace:
        trace.save(args.trace, rounds)
    if not (args.show_tree or args.tree_svg):
        return result
    if number > len(rounds):
        raise ConfigError(f"tree_round={number}: decoding took {len(rounds)} rounds; ask for one of those")
    text = lambda token: _token(run.target, token)
    if args.show_tree:
        for line in draw.lines(rounds[number - 1], number, text):
            _say(line)
    if args.tree_svg:
        pathlib.Path(args.tree_svg).write_text(draw.svg(rounds[number - 1], number, text), encoding="utf-8")
    return result


def _token(target, token: int) -> str:
    """A token as people read it: its text in quotes, or its id where it has none."""
    text = target.tokenizer.decode([token]) if target.tokenizer else ""
    return repr(text) if text else f"<{token}>"


def _summary(result, plain, report) -> None:
    if result.error:  # said in a line of its own
        return
    s = result.seconds
    spent = ", ".join(f"{part} {s[part]:.2f} s" for part in ("load", "compile", "prefill", "decode"))
    _say(
        f"{result.new_tokens} tokens ({result.finish_reason}) in {result.rounds} rounds: acceptance length "
        f"{result.acceptance_length:.2f}, {result.tokens_per_second:.1f} tokens/s ({spent})"
    )
    if result.settings["budget"] == AUTO:
        sizes = collections.Counter(result.tree_sizes)
        _say(f"nodes a round: {', '.join(f'{size} in {count}' for size, count in sorted(sizes.items()))}")
    if report is None:
        return
    verdict = "the same tokens" if report["equal"] else f"DIFFERENT tokens: {report['first_difference']}"
    _say(
        f"plain decoding: {verdict}, {plain.tokens_per_second:.1f} tokens/s; "
        f"speculation is {report['speedup']:.2f}x as fast"
    )
    if not report["equal"]:
        _say(f"plain text: {plain.text}")


def _writable_folder(path: str | None) -> None:
    """Notices a folder that cannot be made before the work."""
    if path is not None:
        place = next(p for p in (pathlib.Path(path), *pathlib.Path(path).absolute().parents) if p.exists())
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise ConfigError(f"profile={shown(path)}: no folder can be made there; name another")


def _device() -> str:
    import jax

    return jax.devices()[0].device_kind


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
