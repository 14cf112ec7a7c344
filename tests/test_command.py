"""The one command line: every option of every command with wrong values; one line and one status for everything."""

import errno
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec_jax import audit, command, decode, doctor, outcome
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.evals import acceptance, ceiling, compare, formats, scorers
from jetspec_jax.fields import Option
from jetspec_jax.training import options as training
from jetspec_jax.training import plot, regenerate, study
from jetspec_jax.training.data import pool

ROOT = pathlib.Path(__file__).parent.parent
COMMANDS = {  # module: words that are right, so that the wrong one is what is refused
    decode: ["--prompt_ids=1"],
    audit: ["--prompts", "x"],
    acceptance: ["--prompts", "x"],
    regenerate: ["--prompts=x", "--out=x"],
    study: ["--config=x", "--data=x", "--workdir=x", "--prompts", "x"],
    pool: ["--data=x", "--out=x"],
    doctor: ["T", "H"],
    formats: ["gsm8k", "x", "x"],
    compare: ["--prompts=x", "--out=x"],
    ceiling: [],
    scorers: ["--gold=x", "--answers=x"],
    plot: ["x"],
}
EVERY = [(module, option) for module in COMMANDS for option in module.LINE.options.values()]
BAD_NUMBERS = ["", "x", "nan", "inf", "-inf", "1e999", "--", "1_0", "0x1", "9" * 5000, "1,2", "½"]
WRONG = {
    "whole": [*BAD_NUMBERS, "1.5", "-1", str(2**40), "true"],
    "number": BAD_NUMBERS,
    "choice": ["", "oak", "x" * 5000],
    "flag": ["", "maybe", "2"],
    "text": [""],
    "texts": [""],
    "ids": ["", "a", "1,,2", "-1", "1;2", "9" * 5000, "1.0"],
    "bias": ["", "3", "3:x", "3:1,3:2", ":1", "9" * 5000 + ":1", "3:nan", "3:inf"],
}


def refused(main, argv, capsys) -> str:
    """The one line of a command that ends with status 2."""
    assert main(argv) == 2, argv
    out, err = capsys.readouterr()
    assert (
        out == "" and err.count("\n") == 1 and len(err) < 400 and "Traceback" not in err and "not expected" not in err
    )
    return err


@pytest.mark.parametrize(
    "module, option", EVERY, ids=[f"{module.__name__.split('.')[-1]}-{option.name}" for module, option in EVERY]
)
def test_every_option_refuses_wrong_values(module, option, capsys):
    for text in WRONG[option.kind]:
        given = [f"--{option.name}", text] if option.many else [f"--{option.name}={text}"]
        if option.many and text.startswith("--"):
            continue
        err = refused(module.main, [*COMMANDS[module], *given], capsys)
        assert f"--{option.name}" in err or option.kind == "texts"


def outside(option: Option):
    """Numbers out of an option's range, as words."""
    low, high = option.low or 0, option.high
    below = st.floats(-1e30, low, exclude_max=not option.above, allow_subnormal=False)
    above = st.nothing() if high is None else st.floats(high, 1e35, exclude_min=True)
    if option.kind == "whole":
        below = st.integers(-(10**12), int(low) - 1)
        above = st.integers(int(high if high is not None else 2**31 - 1) + 1, 10**12)
    return (below | above).map(repr)


NUMBERS = [option for option in (*command.SAMPLING.values(), *command.TREE.values()) if option.kind in WRONG.keys()
           & {"whole", "number"}]  # fmt: skip


@given(st.data())
def test_numbers_out_of_range_are_refused_on_the_command_line_and_in_python(data):
    option = data.draw(st.sampled_from(NUMBERS))
    text = data.draw(outside(option))
    with pytest.raises(command.UsageError, match=re.escape(f"--{option.name}=")):
        decode.LINE.parse(["--prompt_ids=1", f"--{option.name}={text}"])
    config = TreeConfig if option.name in ("width", "depth", "sharpness", "window", "prune") else SamplingConfig
    with pytest.raises(ConfigError, match=f"^{option.name}="):
        config(**{option.name: float(text) if option.kind == "number" else int(text)})


@given(st.data())
def test_right_values_reach_the_configurations(data):
    words, wanted = [], {}
    for option in data.draw(st.lists(st.sampled_from(NUMBERS), unique_by=lambda o: o.name)):
        low, high = option.low or 0, 1000 if option.high is None else option.high
        kind = st.integers(int(low), int(high)) if option.kind == "whole" else st.floats(low, high, exclude_min=True)
        wanted[option.name] = data.draw(kind)
        dashes = data.draw(st.sampled_from(["_", "-"]))
        words += [f"--{option.name.replace('_', dashes)}", repr(wanted[option.name])]
    args = decode.LINE.parse(["--prompt_ids", "1", *words])
    tree = command.tree_of(args)
    own = [k for k in wanted if k in ("budget", "width", "depth", "sharpness", "window", "prune")]
    assert {k: wanted[k] for k in own} == {k: getattr(tree, k) for k in own}
    if wanted.get("min_new_tokens", 0) <= wanted.get("max_new_tokens", 256):
        sampling = command.sampling_of(args)
        own = [k for k in wanted if k in command.SAMPLING and k != "budget"]
        assert {k: wanted[k] for k in own} == {k: getattr(sampling, k) for k in own} and sampling.budget is None
    assert args.given == {"prompt_ids", *wanted}


@given(st.sampled_from(sorted(decode.METHODS)), st.data())
def test_every_method_refuses_what_contradicts_it(method, data):
    refused = decode.METHODS[method].refused
    if not refused:
        return
    name = data.draw(st.sampled_from(refused))
    option = decode.LINE.options[name]
    value = {"whole": "3", "number": "0.5", "flag": "true"}.get(option.kind, (option.choices or ("x",))[0])
    args = decode.LINE.parse(["--prompt_ids=1", f"--method={method}", f"--{name}={value}"])
    with pytest.raises(command.UsageError, match=f"--{name} contradicts --method {method}"):
        decode._check(args)


@pytest.mark.parametrize(
    "option, words",
    [("--target", "owner/name)"), ("--prompt_file", "name too long"), ("--trace", "name too long")],
)
def test_a_long_path_hides_no_reason(option, words, capsys):
    """The middle of a long line is left out: what is wrong, and what helps, stands at its end."""
    given = {"--target": "t", "--head": "h", "--prompt_ids": "1"} | {option: "x" * 100_000}
    if option == "--prompt_file":
        del given["--prompt_ids"]
    assert decode.main([word for pair in given.items() for word in pair]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) < 600 and words in lines[-1] and "..." in lines[-1]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--prompt_ids=1", "--trace=x", "--tree_svg=x"], "--trace and --tree_svg name one file"),
        (["--promt", "x"], "--promt: no such option; did you mean --prompt?"),
        (["--max-new-tokns=3"], "did you mean --max_new_tokens?"),
        (["--" + "z" * 5000], "--help lists the options"),
        (["--prompt"], "--prompt: a value is missing"),
        (["--nojson=3"], "it takes no value"),
        (["--json", "maybe"], "--json='maybe': give true or false"),
        (["hello"], "a prompt goes after --prompt"),
        (["--prompt_ids=1", "--batch=2"], "--batch without --prompt_file"),
        (["--prompt_file=x", "--show_tree"], "--show_tree with --prompt_file"),
        (["--prompt_file=x", "--batch=2", "--stream"], "--stream contradicts --batch"),
        (["--prompt_ids=1", "--tree_round=2"], "--tree_round without --show_tree"),
        (["--prompt_ids=1", "--target=t", "--method=ddtree"], "--target without --head"),
    ],
)
def test_mistakes_of_decode(argv, words, capsys):
    assert words in refused(decode.main, argv, capsys)


def test_dashes_negations_aliases_and_values_that_look_like_options():
    line = decode.LINE
    args = line.parse(
        ["--prompt", "--json", "--no-chat", "--attention", "xla", "--stop=a", "--stop", "--b", "--nothinking"]
    )
    assert (args.prompt, args.chat, args.backend, args.stop, args.json) == ("--json", False, "xla", ["a", "--b"], False)
    assert args.thinking is False and args.given == {"prompt", "chat", "backend", "stop", "thinking"}
    assert line.parse(["--thinking", "on", "--temperature", "-0"]).thinking is True
    args = acceptance.LINE.parse(["--prompts", "a", "b", "--budget", "4", "8", "--no-thinking"])
    assert (args.prompts, args.budget, args.thinking, args.sharpness) == (["a", "b"], [4, 8], False, [1.2])


def test_keys_of_the_training_configuration_are_options(capsys):
    (path,) = [training.find("tiny_cpu")]
    assert path.is_file() and training.find("configs/tiny_cpu.py") == pathlib.Path("configs/tiny_cpu.py")
    config, _ = training.parse(["--config=tiny_cpu", "--workdir=w", "--config.peak-lr=0.5", "--config.causal", "false"])
    assert (config.peak_lr, config.causal, config.steps) == (0.5, False, 60)
    with pytest.raises(ConfigError, match=r"did you mean --config\.batch"):
        training.parse(["--config=tiny_cpu", "--workdir=w", "--config.btch=1"])


def test_the_documents_hold_the_table():
    text = (ROOT / "docs" / "options.md").read_text()
    for config in (SamplingConfig, TreeConfig):
        assert command.markdown(config) in text, f"put command.markdown({config.__name__}) into docs/options.md"


class TestOutcome:
    @staticmethod
    def ended(error, capsys, full=""):
        def work():
            raise error

        status = outcome.run("tool", work, full)
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("tool: ") and "Traceback" not in err
        return status, err[6:].strip()

    def test_every_kind_of_error_is_one_line(self, capsys):
        deep = ValueError("a\n" * 700)
        deep.__cause__ = OSError(errno.ENOSPC, "No space left on device", "/w/checkpoint")
        cases = [
            (ConfigError("x=1: give 2"), 1, "x=1: give 2"),
            (command.UsageError("--x"), 2, "--x"),
            (FileNotFoundError(2, "No such file or directory", "a\udcff"), 1, "No such file"),
            (deep, 1, "/w/checkpoint: No space left on device"),
            (ExceptionGroup("g", [deep]), 1, "No space left"),
            (RuntimeError("Unable to initialize backend 'tpu': x"), 1, "Unable to initialize backend"),
            (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore"), 1, "if the device is full: fewer"),
            (MemoryError(), 1, "out of memory"),
            (RecursionError("deep"), 1, "nested too deeply"),
            (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), 1, "not UTF-8"),
            (KeyError("k"), 1, "KeyError: 'k' (not expected"),
            (KeyboardInterrupt(), 130, "interrupted"),
            (outcome.Terminated(), 143, "terminated"),
            (SystemExit("said"), 1, "said"),
            (ConfigError("long " * 1000), 1, "long"),
        ]
        for error, wanted, words in cases:
            status, line = self.ended(error, capsys, "fewer")
            assert status == wanted and words in line and len(line) < 600, (error, line)

    def test_what_an_interrupted_command_says(self, capsys):
        def work():
            raise KeyboardInterrupt

        assert outcome.run("tool", work, after="; go on") == 130
        assert capsys.readouterr().err == "tool: interrupted; go on\n"

    def test_a_developer_may_see_where(self, monkeypatch):
        monkeypatch.setenv("JETSPEC_TRACEBACK", "1")
        with pytest.raises(ZeroDivisionError):
            outcome.run("tool", lambda: 1 // 0)

    def test_the_status_of_libraries(self, capsys):
        assert outcome.run("tool", lambda: sys.exit(3)) == 3 and outcome.run("tool", lambda: sys.exit()) == 0


def process(*argv, seconds: float = 60, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT} | options
    return subprocess.run([sys.executable, *argv], timeout=seconds, check=False, **options)


class TestStreams:
    """Real processes: what Python does at its own end cannot be seen from inside."""

    def test_a_reader_that_has_had_enough(self):
        inlet, outlet = os.pipe()
        os.close(inlet)
        got = process("decode.py", "--help", stdout=outlet)
        os.close(outlet)
        assert (got.returncode, got.stderr) == (1, "")

    def test_a_closed_and_a_full_output(self):
        closed = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, 'decode.py', '--help'])"
        got = process("-c", closed)
        assert got.returncode == 1 and got.stderr == "decode: standard output is closed; there is nowhere to answer\n"
        with open("/dev/full", "w") as full:
            got = process("decode.py", "--help", stdout=full)
        assert got.returncode == 1 and got.stderr == "decode.py: No space left on device\n"

    @pytest.mark.parametrize("level", ["-O", "-OO"])
    def test_help_without_docstrings(self, level):
        got = process(level, "decode.py", "--help")
        assert got.returncode == 0 and "--prompt_file" in got.stdout and got.stderr == ""


WORKS = {
    "computes": "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",  # outside Python, as XLA is
    "swallows": "\n".join(["try:", "    time.sleep(60)", "except BaseException:", "    time.sleep(60)"]),
    "sleeps": "time.sleep(60)",
    "makes another error of it": "\n".join(["try:", "    time.sleep(60)", "except BaseException:", "    1 // 0"]),
    "is imported": "import slow",
    "holds what a device works with": "held = type('', (), {'__del__': lambda _: os.abort()})()\ntime.sleep(60)",
}


class TestSignals:
    @pytest.fixture(autouse=True)
    def heard(self):
        """Lets children hear Ctrl-C: what a shell starts in the background ignores it, and so would they."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    @pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    @pytest.mark.parametrize("work", WORKS)
    def test_the_end_comes_in_two_seconds(self, work, number, status, tmp_path):
        (tmp_path / "slow.py").write_text("import time\ntry:\n    time.sleep(60)\nexcept BaseException:\n    pass\n")
        (tmp_path / "long.py").write_text(
            "import hashlib, os, time\nfrom jetspec_jax import command\n\n"
            "@command.tool('long', after='; go on')\ndef main(argv):\n    print('ready', flush=True)\n"
            + textwrap.indent(WORKS[work], "    ") + "\n    return 0\n"
        )  # fmt: skip
        running = subprocess.Popen(
            [sys.executable, "-c", "from jetspec_jax import outcome; outcome.start('long')"], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        )  # fmt: skip
        assert running.stdout.readline() == "ready\n"
        time.sleep(0.1)
        begin = time.monotonic()
        running.send_signal(number)
        _, err = running.communicate(timeout=20)
        word = {130: "interrupted", 143: "terminated"}[status]
        assert running.returncode == status and err == f"long: {word}; go on\n"
        assert time.monotonic() - begin < 2

    @pytest.mark.parametrize("after", [0.15, 0.6])
    def test_imports(self, after):
        running = subprocess.Popen(
            [sys.executable, "-m", "jetspec_jax.audit", "--prompts", "none"], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        time.sleep(after)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=20)
        assert "Traceback" not in err and (running.returncode in (130, -2)) and out == ""
