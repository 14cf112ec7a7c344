"""Decodes prompts with a target and a draft head; the output equals plain decoding.

    python decode.py --prompt "Write a sorting function."       the demo pair, on whatever device there is
    python decode.py --prompt "..." --compare                   also decode plainly: same tokens, both rates
    python decode.py --target DIR --head DIR --prompt_file prompts.jsonl --json

Text or JSON goes to stdout, everything else to stderr. Exit status: 0 done, 2 the flags are wrong, 1 the files or the
run are, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import json
import os
import sys
from typing import Any

from absl import flags

FLAGS = flags.FLAGS
flags.DEFINE_string("target", None, "Target: a folder, a .gguf file or a hub id. Default: the demo target.")
flags.DEFINE_string("head", None, "Draft head: a folder or a hub id. Default with the demo target: the demo head.")
flags.DEFINE_enum(
    "method",
    "jetspec",
    ["jetspec", "dflash", "autoregressive"],
    "jetspec: a tree from the head's block; dflash: the chain of a bidirectional head; autoregressive: no draft.",
)
flags.DEFINE_string("prompt", None, "Prompt text.")
flags.DEFINE_string("prompt_ids", None, "Prompt as token ids, e.g. 1,2,3; for checkpoints without a tokenizer too.")
flags.DEFINE_string(
    "prompt_file",
    None,
    'JSONL: {"prompt": ...}, {"messages": [...]} or {"prompt_ids": [...]} a line; optional id, and options of its own: '
    "max_new_tokens, min_new_tokens, temperature, seed, top_k, top_p, min_p, the penalties, logit_bias, bad_words, "
    "stop, stop_token_ids, ignore_eos, include_stop_text, logprobs, budget. Prompts are decoded one after the other.",
)
flags.DEFINE_integer("max_new_tokens", 256, "Most tokens to generate.")
flags.DEFINE_integer("min_new_tokens", 0, "No end token, stop token or stop string before this many tokens.")
flags.DEFINE_integer(
    "budget", None, "Tree nodes verified a round, root included; 1 is plain decoding. Default: 8 on a CPU, else 64."
)
flags.DEFINE_integer(
    "width", None, "Candidates a depth (best_first, default 64) or children a node (accum_logp, default 7)."
)
flags.DEFINE_integer("depth", None, "Longest drafted path. Default: the head's block without its anchor.")
flags.DEFINE_enum(
    "tree",
    None,
    ["best_first", "accum_logp"],
    "best_first (default): the most probable nodes; accum_logp: whole siblings.",
)
flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
flags.DEFINE_integer("seed", 0, "Seed of sampling; in f32 a seed gives the same tokens with any method and budget.")
flags.DEFINE_integer("top_k", 0, "Sample among the k largest logits (and what equals the k-th); 0 keeps all.")
flags.DEFINE_float("top_p", 1.0, "Sample among the fewest tokens that have this probability together; 1 keeps all.")
flags.DEFINE_float("min_p", 0.0, "Sample among tokens of at least this share of the largest probability.")
flags.DEFINE_float("repetition_penalty", 1.0, "Of tokens in prompt or output, as transformers has it; 1 is off.")
flags.DEFINE_float("presence_penalty", 0.0, "Taken from the logits of tokens in the output, once.")
flags.DEFINE_float("frequency_penalty", 0.0, "Taken from the logits of tokens in the output, once for each time.")
flags.DEFINE_string("logit_bias", None, "Added to logits: TOKEN_ID:NUMBER,... e.g. 5:1.5,7:-100.")
flags.DEFINE_multi_string(
    "bad_words", [], "A text whose tokens the output will not contain in a row, here or behind a space; repeatable."
)
flags.DEFINE_multi_string("stop", [], "A text that ends the output; repeatable.")
flags.DEFINE_string("stop_token_ids", None, "Token ids that end the output, beside the target's own: 1,2,3.")
flags.DEFINE_boolean("ignore_eos", False, "Go on behind the target's own end tokens.")
flags.DEFINE_boolean("include_stop_text", False, "Keep the text of the stop string or stop token in the text.")
flags.DEFINE_boolean("logprobs", False, "With --json: log-probability of each new token under the bare target.")
flags.DEFINE_float(
    "sharpness",
    None,
    "How far sampled drafts trust the known noise; 0 leaves it out. Changes the speed and never the output. "
    "Default: by measurement.",
)
flags.DEFINE_boolean("chat", None, "Put the prompt through the chat template. Default: where there is one.")
flags.DEFINE_boolean(
    "thinking",
    None,
    "Let the chat template leave room for thinking. Default: as the head was trained (its jetspec.json), else off.",
)
flags.DEFINE_integer(
    "prefill_chunk", None, "Prompt tokens read at a time; memory grows with it, not with the prompt. Default: 512."
)
flags.DEFINE_boolean("stream", None, "Print text as it comes. Default: yes, unless --json or --trace.")
flags.DEFINE_enum("dtype", None, ["float32", "bfloat16", "float16"], "Dtype of the weights. Default: the file's.")
flags.DEFINE_enum(
    "attention",
    "auto",
    ["auto", "xla", "cudnn", "pallas"],
    "What computes attention; pallas also uses our kernels for the rest of a layer. auto: pallas for 16-bit weights on "
    "a Hopper GPU, else xla. pallas without a GPU runs in an interpreter: right, and slow.",
)
flags.DEFINE_enum(
    "xla_flags",
    "none",
    ["none", "tested", "print"],
    "tested: add the XLA flags that were measured with the installed jaxlib (docs/performance.md); print: show them.",
)
flags.DEFINE_string("profile", None, "Decode once more, compiled, and write a profiler trace of it into this folder.")
flags.DEFINE_boolean("compare", False, "Also decode plainly; report whether the tokens are equal, and both rates.")
flags.DEFINE_string("trace", None, "Store every round's draft logits, tree and accepted path in this .npz file.")
flags.DEFINE_boolean("json", False, "Print one JSON object a prompt instead of text.")

PLAIN_OPTIONS = (
    "max_new_tokens", "min_new_tokens", "temperature", "seed", "top_k", "top_p", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "bad_words", "stop", "ignore_eos", "include_stop_text", "logprobs",
)  # fmt: skip
ROW_OPTIONS = *PLAIN_OPTIONS, "logit_bias", "stop_token_ids", "budget"
REFUSED = {
    "autoregressive": ("head", "budget", "width", "depth", "tree", "sharpness", "trace", "compare"),
    "dflash": ("budget", "width", "tree"),
}


class UsageError(Exception):
    """The flags alone are wrong; one line."""


def main(argv: list[str]) -> int:
    """Parses, decodes, prints; returns the exit status."""
    from jetspec_jax import command
    from jetspec_jax.config import ConfigError
    from jetspec_jax.files import xla

    for output in (sys.stdout, sys.stderr):  # what a narrow terminal cannot show is escaped
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="backslashreplace")
    try:
        _parse(argv)
        if FLAGS.xla_flags == "print":
            print(*xla.tested_flags(), sep="\n")
            return 0
        if FLAGS.xla_flags == "tested":
            xla.apply_flags()
        tree, sampling = _configs()
        given = None if FLAGS.prompt_ids is None else command.ids("prompt_ids", FLAGS.prompt_ids)
    except ConfigError as error:
        return _fail(2, f"--{error}")
    except (flags.Error, UsageError) as error:
        return _fail(2, error)

    import jax

    from jetspec_jax.speculate import DecodeError

    try:
        rows = _rows(given, sampling)
        if FLAGS.trace:
            open(FLAGS.trace, "ab").close()  # a path that cannot be written is noticed before the work
        if FLAGS.profile:
            os.makedirs(FLAGS.profile, exist_ok=True)
        target, head, tree = _load(tree)
        _say(f"decoding on {_device()}; programs that are new to this machine are compiled first")
        mode = _thinking(target, head)
        for row in rows:  # all are checked before the first is decoded
            row.thinking = None if isinstance(row.prompt, list) and isinstance(row.prompt[0], int) else mode
            row.prompt = _encode(target, row)
        for row in rows:
            _decode(target, head, tree, row)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ConfigError, DecodeError, OSError) as error:
        return _fail(1, error)
    except jax.errors.JaxRuntimeError as error:
        hint = (
            "if the device is full: end other programs, set XLA_PYTHON_CLIENT_MEM_FRACTION, or take a smaller --budget"
        )
        return _fail(1, f"{str(error).splitlines()[0][:200]} ({hint})")
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    return 0


def _parse(argv: list[str]) -> None:
    if {"-h", "--help"} & set(argv[1:]):
        print(__doc__, FLAGS.module_help(sys.modules[__name__]), sep="\n")
        sys.exit(0)
    known = set(FLAGS) | {f"no{name}" for name in FLAGS if FLAGS[name].boolean}

    def normal(word: str) -> str:
        """Dashes and underscores both work in the names of flags."""
        name, equals, value = word.removeprefix("--").partition("=")
        fixed = name.replace("-", "_")
        return f"--{fixed}{equals}{value}" if word.startswith("--") and fixed in known else word

    try:
        rest = FLAGS([normal(word) for word in argv])[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname.replace("-", "_"), known, n=1)
        hint = f"; did you mean --{near[0]}?" if near else "; --help lists the flags"
        raise UsageError(f"--{error.flagname}: no such flag{hint}") from None
    except (flags.IllegalFlagValueError, ValueError) as error:
        raise UsageError(str(error).replace("\n", " ")) from None
    if rest:
        raise UsageError(f"{rest[0]!r}: unexpected argument; a prompt goes behind --prompt")


def _configs():
    """Tree and sampling as the flags alone give them."""
    from jetspec_jax import command
    from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig

    prompts = [name for name in ("prompt", "prompt_ids", "prompt_file") if FLAGS[name].value is not None]
    if len(prompts) != 1:
        got = f"{' and '.join(f'--{p}' for p in prompts)} together" if prompts else "no prompt"
        raise UsageError(f"{got}: give one of --prompt, --prompt_ids, --prompt_file")
    if FLAGS.prompt == "":
        raise UsageError("--prompt='': the prompt is empty; give at least one character")
    for name in ("target", "head", "trace", "profile", "prompt_file"):
        if FLAGS[name].value == "":
            raise UsageError(f"--{name}='': the value is empty; name it, or leave the flag out")
    for name in REFUSED.get(FLAGS.method, ()):
        if FLAGS[name].present:
            raise UsageError(f"--{name} contradicts --method {FLAGS.method}; leave one of them out")
    if FLAGS.target is not None and FLAGS.head is None and FLAGS.method != "autoregressive":
        raise UsageError("--target without --head: name the head, or use --method autoregressive")
    if FLAGS.trace is not None and FLAGS.prompt_file is not None:
        raise UsageError("--trace with --prompt_file: a trace holds one prompt; use --prompt or --prompt_ids")
    if FLAGS.stream and (FLAGS.json or FLAGS.trace):
        raise UsageError(f"--stream contradicts --{'json' if FLAGS.json else 'trace'}; leave one of them out")
    if FLAGS.logprobs and not FLAGS.json:
        raise UsageError("--logprobs without --json: only the JSON object has room for them; add --json")
    if FLAGS.chat is not None and FLAGS.prompt_ids is not None:
        name = "--chat" if FLAGS.chat else "--nochat"
        raise UsageError(f"{name} with --prompt_ids: ids are taken as they are; leave {name} out")
    if FLAGS.thinking is not None and (FLAGS.prompt_ids is not None or FLAGS.chat is False):
        other = "--nochat" if FLAGS.chat is False else "--prompt_ids"
        name = "--thinking" if FLAGS.thinking else "--nothinking"
        raise UsageError(f"{name} with {other}: no chat template is used; leave {name} out")
    if FLAGS.prefill_chunk is not None and FLAGS.prefill_chunk < 1:
        raise UsageError(f"--prefill_chunk={FLAGS.prefill_chunk}: give a whole number of tokens >= 1")
    try:
        sharp = {} if FLAGS.sharpness is None else {"sharpness": FLAGS.sharpness}
        tree = TreeConfig(FLAGS.budget, FLAGS.width, FLAGS.depth, FLAGS.tree or "best_first", **sharp)
        options = {name: FLAGS[name].value for name in PLAIN_OPTIONS}
        more = command.bias(FLAGS.logit_bias), command.ids("stop_token_ids", FLAGS.stop_token_ids)
        return tree, SamplingConfig(**options, logit_bias=more[0], stop_token_ids=more[1])
    except ConfigError as error:
        raise UsageError(f"--{error}") from None


@dataclasses.dataclass
class Row:
    """One prompt of the command line or of a line of --prompt_file."""

    prompt: Any  # text, token ids, or messages
    sampling: Any
    id: Any = None
    where: str = ""  # file and line
    thinking: bool | None = None  # how it was rendered


def _rows(ids: list[int] | None, sampling) -> list[Row]:
    from jetspec_jax.config import ConfigError

    if FLAGS.prompt_file is None:
        return [Row(FLAGS.prompt if ids is None else ids, sampling)]
    try:
        with open(FLAGS.prompt_file, encoding="utf-8-sig") as lines:
            rows = [_row(line, f"{FLAGS.prompt_file}:{n}", sampling) for n, line in enumerate(lines, 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{FLAGS.prompt_file}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not rows:
        raise ConfigError(f"{FLAGS.prompt_file}: no prompt in it")
    return rows


def _row(line: str, where: str, sampling) -> Row:
    from jetspec_jax.config import ConfigError

    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error.msg})") from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{where}: not JSON that can be read (nested too deeply, or a number too long)") from None
    if not isinstance(raw, dict) or len({"prompt", "messages", "prompt_ids"} & raw.keys()) != 1:
        raise ConfigError(f'{where}: give one of {{"prompt": "..."}}, {{"messages": [...]}}, {{"prompt_ids": [...]}}')
    unknown = raw.keys() - {"prompt", "messages", "prompt_ids", "id", *ROW_OPTIONS}
    if unknown:
        known = ", ".join(("prompt", "messages", "prompt_ids", "id", *ROW_OPTIONS))
        raise ConfigError(f"{where}: unknown key {min(unknown)!r}; known are {known}")
    kind = next(key for key in ("prompt", "messages", "prompt_ids") if key in raw)
    prompt, some = raw[kind], isinstance(raw[kind], list) and raw[kind]
    turn = lambda m: isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
    right = {
        "prompt": isinstance(prompt, str),
        "messages": some and all(map(turn, prompt)),
        "prompt_ids": some and all(type(i) is int for i in prompt),
    }
    if not right[kind]:
        raise ConfigError(
            f"{where}: prompt must be text, messages a list of {{role, content}}, prompt_ids a list of ids"
        )
    if prompt == "":
        raise ConfigError(f"{where}: the prompt is empty; give at least one character")
    given = {name: raw[name] for name in ROW_OPTIONS if name in raw}
    for name in REFUSED.get(FLAGS.method, ()):
        if name in given:
            raise ConfigError(f"{where}: {name} contradicts --method {FLAGS.method}; leave one of them out")
    if given.get("logprobs") and not FLAGS.json:
        raise ConfigError(f"{where}: logprobs without --json: only the JSON object has room for them; add --json")
    try:
        return Row(prompt, dataclasses.replace(sampling, **given), raw.get("id"), where)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _load(tree):
    """Target, head (or None) and the tree of the method."""
    from jetspec_jax.config import ConfigError
    from jetspec_jax.files import demo, load

    path = FLAGS.target or demo.fetch_target()
    _say(f"loading {FLAGS.target or 'the demo target'}")
    target = load.load_target(path, FLAGS.dtype, FLAGS.attention)
    if FLAGS.method == "autoregressive":
        return target, None, tree
    head = load.load_head(FLAGS.head or demo.head_folder(), target)
    if FLAGS.method == "dflash":
        if head.config.causal:
            raise ConfigError(f"method=dflash: {head.source} is a causal head; use --method jetspec")
        depth = FLAGS.depth or head.draft.depth
        tree = dataclasses.replace(tree, budget=depth + 1, width=1, builder="accum_logp")
    return target, head, tree


def _thinking(target, head) -> bool | None:
    """The mode that prompts are rendered in; None where no template with a switch is used."""
    from jetspec_jax.files import pair

    rendered = FLAGS.prompt_ids is None and FLAGS.chat is not False
    return pair.thinking(target, head, FLAGS.thinking) if rendered else None


def _encode(target, row: Row) -> list[int]:
    """Token ids of a prompt that fits the target."""
    from jetspec_jax import speculate
    from jetspec_jax.config import ConfigError

    prompt = row.prompt
    try:
        if isinstance(prompt, list) and isinstance(prompt[0], dict):
            ids = target.encode_messages(prompt, FLAGS.chat, row.thinking)
        else:
            ids = speculate.prompt_ids(target, prompt, FLAGS.chat, row.thinking)
        speculate.check(target, ids, row.sampling)
    except ConfigError as error:
        raise ConfigError(f"{row.where}: {error}" if row.where else str(error)) from None
    return ids


def _decode(target, head, tree, row: Row) -> None:
    import jax

    from jetspec_jax import baseline, speculate
    from jetspec_jax.evals import trace

    ids, chunk = row.prompt, {"prefill_chunk": FLAGS.prefill_chunk}
    if FLAGS.trace:
        result = trace.run(FLAGS.trace, target, head, ids, tree, row.sampling, FLAGS.prefill_chunk)
    elif FLAGS.json or FLAGS.stream is False:
        result = speculate.generate(target, head, [ids], tree, row.sampling, **chunk)[0]
    else:
        for piece in speculate.stream(target, head, ids, tree, row.sampling, **chunk):
            print(piece.text, end="", flush=True)
            result = piece.result
    result.settings["thinking"] = row.thinking  # the prompt was rendered here
    if FLAGS.profile:
        with jax.profiler.trace(FLAGS.profile):
            speculate.generate(target, head, [ids], tree, row.sampling, **chunk)
    plain = baseline.generate(target, [ids], row.sampling, **chunk)[0] if FLAGS.compare else None
    report = baseline.compare(target, ids, plain, result, row.sampling) if plain else None

    if FLAGS.json:
        extra = ({"id": row.id} if row.id is not None else {}) | ({"compare": report} if report else {})
        print(json.dumps(result.to_json() | {"method": FLAGS.method, "prompt_ids": ids} | extra), flush=True)
    else:
        print("" if FLAGS.stream is not False and not FLAGS.trace else result.text, flush=True)
        _summary(result, plain, report)


def _summary(result, plain, report) -> None:
    s = result.seconds
    spent = ", ".join(f"{part} {s[part]:.2f} s" for part in ("load", "compile", "prefill", "decode"))
    _say(
        f"{result.new_tokens} tokens ({result.finish_reason}) in {result.rounds} rounds: acceptance length "
        f"{result.acceptance_length:.2f}, {result.tokens_per_second:.1f} tokens/s "
        f"({spent})"
    )
    if report is None:
        return
    verdict = "the same tokens" if report["equal"] else f"DIFFERENT tokens: {report['first_difference']}"
    _say(
        f"plain decoding: {verdict}, {plain.tokens_per_second:.1f} tokens/s; "
        f"speculation is {report['speedup']:.2f}x as fast"
    )
    if not report["equal"]:
        _say(f"plain text: {plain.text}")


def _device() -> str:
    import jax

    return jax.devices()[0].device_kind


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _fail(status: int, error) -> int:
    _say(f"decode.py: {error}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv))
