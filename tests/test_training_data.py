"""Training data: settings, rows from files, what is learnt of them, and the pool of prompts."""

import json
import math
import pathlib

import numpy as np
import pytest
from small import ALPHABET, Letters, random_examples

from jetspec_jax.config import ConfigError, ModelConfig
from jetspec_jax.evals import formats
from jetspec_jax.training import code_prompts, examples, options, packing, pool, rows, settings
from jetspec_jax.training.batches import Batches

SOURCE = '''
class Box:
    def lift(self, n: int = 1) -> int:
        """Lift the box by n units, slowly."""
        return n

def twice(x):
    """Return two times the number.

    >>> twice(2)
    4
    >>> twice(y)
    z
    """
    return 2 * x

def _hidden():
    """This one is private and left out."""
'''
ROOT = pathlib.Path(__file__).parent.parent
LEAST = {"mask_token_id": 3, "steps": 10, "data": "x"}
MODEL = ModelConfig("qwen3", 48, 16, 4, 2, 1, 8, 24, 1e-6, 1e4, 512, True, True)


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


# ---- settings


WRONG = [
    ({"mask_token_id": -1}, "mask_token_id is missing: give the id"),
    ({"mask_token_id": -7}, "mask_token_id=-7: negative"),
    ({"block_size": 1}, "block_size=1: give a number >= 2"),
    ({"sequence_length": 8}, "block_size=16: longer than sequence_length=8"),
    ({"dtype": "bfloat61"}, "dtype=bfloat61: choose one of .*did you mean bfloat16"),
    ({"clip": 0}, "clip=0.0: give a number > 0"),
    ({"peak_lr": math.nan}, "peak_lr=nan: a finite number is needed"),
    ({"gamma": math.inf}, "gamma=inf: a finite number"),
    ({"anchors": 2.5}, "anchors=2.5: a whole number is needed"),
    ({"anchors": True}, "anchors=True: a whole number"),
    ({"causal": 1}, "causal=1: true or false is needed"),
    ({"tap_layers": "1,2"}, "tap_layers='1,2': a list of whole numbers"),
    ({"beta2": 1.0}, "beta2=1.0: give a number >= 0 and <= 0.99999"),
    ({"forward_kl": 0.0}, "are all 0; give one a share"),
    ({"steps": 0}, "give one of the two"),
    ({"batch": 8, "accumulate": 3}, "accumulate=3: it must divide batch=8"),
    ({"eval_budgets": (1, 16)}, "give numbers in 2..1024"),
    ({"answers": "corpus", "data": ""}, "give the rows with"),
    ({"untill": "pool"}, "untill: no such key; did you mean until"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=lambda x: str(x)[:24])
def test_wrong_settings_are_named(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        settings.make(LEAST | change, "c.py")
    assert "\n" not in str(error.value)


def test_taps_and_the_mask_must_fit_the_target():
    make = lambda **change: settings.make(LEAST | {"tap_layers": (0, 2), "sequence_length": 64} | change, "c.py")
    head = make().head_config(MODEL, (1, 2))
    assert head.tap_layers == (0, 2) and head.vocab_size == 48 and head.causal
    for change, message in [
        ({"mask_token_id": 48}, "mask_token_id=48: the target has the embedding rows 0..47"),
        ({"mask_token_id": 2}, "mask_token_id=2: an end token of the target"),
        ({"tap_layers": (0, 4)}, r"tap_layers=\(0, 4\): does not fit the target .*0-based, 0..3"),
        ({"tap_layers": (1, 1)}, "a layer is listed twice"),
        ({"sequence_length": 513}, "the target has 512 positions"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make(**change).head_config(MODEL, (1, 2))


def test_missing_paths_are_noticed_at_once(tmp_path):
    for change, message in [
        ({"data": ""}, "--config.data is missing"),
        ({"data": str(tmp_path / "rows")}, r"--config.data=.*rows: no such file or folder"),
        ({"data": "", "prompt_sets": str(tmp_path / "x")}, "prompt_sets=.*x: no such file"),
        ({"data": str(tmp_path), "decode_prompts": "nowhere.jsonl"}, "decode_prompts=nowhere.jsonl: no such file"),
    ]:
        with pytest.raises(ConfigError, match=message):
            settings.make(LEAST | change, "c.py").check_files()


def test_command_line(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("def get_config():\n  return dict(mask_token_id=3, steps=1, data='d', gamma=7)\n")
    base = ["--config", str(path), f"--workdir={tmp_path}"]
    config, workdir = options.parse([*base, "--config.steps=7", "--config.causal", "false", "--config.tap_layers=1,9"])
    assert (config.steps, config.causal, config.gamma, config.tap_layers) == (7, False, 7.0, (1, 9))
    assert workdir == tmp_path
    for wrong, message in [
        ("--config.stepz=3", r"did you mean --config\.steps"),
        ("--config.steps=x", "steps=x: a whole number is needed"),
        ("--config.peak_lr=nan", "a finite number"),
        ("--config.causal=maybe", "true or false"),
        ("--wordkir=x", "did you mean --workdir"),
        ("--config.steps", "a value is missing"),
        ("steps=3", "not an option"),
    ]:
        with pytest.raises(ConfigError, match=message):
            options.parse([*base, wrong])
    for text, message in [
        ("x = 1", "no function get_config"),
        ("get_config = 3", "no function get_config"),
        ("def get_config(): return 7", "returns int; a ConfigDict or dict"),
        ("def get_config(): return {}['a']", "get_config.. fails .KeyError"),
        ("def get_config(a): return {}", "get_config.. fails .TypeError"),
        ("raise SystemExit(3)", "not a configuration file"),
        ("def get_config(:", "not a configuration file .SyntaxError"),
        ("def get_config(): return {'stepz': 3}", "c.py: stepz: no such key; did you mean steps"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=message) as error:
            options.parse(base)
        assert "\n" not in str(error.value)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="a folder is needed"):
        options.parse([*base[:2], f"--workdir={tmp_path / 'file'}"])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_committed_configurations_are_valid(path):
    config = settings.make(options.load(path) | {"data": "rows.jsonl", "prompt_sets": ""}, str(path))
    assert config.steps or config.epochs
    text = path.read_text()
    assert f"--config configs/{path.name}" in text and ("Run " in text or "Not run" in text)


# ---- rows


def write(path, values):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(v) + "\n" for v in values))
    return path


def test_rows_from_jsonl(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"id": 7, "text": "x"}, {"text": "y"}])
    got = list(rows.read(path))
    assert [r.identity for r in got] == ["7", "a.jsonl:2"] and got[1].where == f"{path}:2"
    write(tmp_path / "b.jsonl", [{"text": "z"}])
    assert len(list(rows.read(tmp_path))) == 3
    path.write_text('{"text": "x"}\n{"text":\n')
    with pytest.raises(ConfigError, match=r"a.jsonl:2: not a JSON object"):
        list(rows.read(path))
    for source, message in [
        (tmp_path / "none", "no such file"),
        (write(tmp_path / "c.csv", []), "rows come from .jsonl, .parquet, .arrow files"),
        (write(tmp_path / "d" / "c.csv", []).parent, "no .jsonl, .parquet, .arrow files in it"),
    ]:
        with pytest.raises(ConfigError, match=message):
            list(rows.read(source))


def test_empty_columns_of_a_mixed_table_are_not_there():
    empty = {"messages": None, "prompt": None, "response": None, "text": None}
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]}
    kept, report = build([empty | {"text": "plain"}, empty | talk, empty | {"prompt": "a", "response": "bc"}])
    assert [shown(e) for e in kept] == ["plain", "....bc$", "....bc$"] and not report.dropped


def test_rows_from_parquet_and_a_dataset_on_disk(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    values = [{"id": str(i), "messages": [user(f"q{i}"), answer("a")]} for i in range(3)]
    table = pyarrow.Table.from_pylist(values)
    parquet.write_table(table, tmp_path / "a.parquet")
    assert [r.value for r in rows.read(tmp_path / "a.parquet")] == values

    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    with pyarrow.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder.parent / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert [r.value for r in rows.read(folder.parent)] == values
    (folder.parent / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(ConfigError, match="it has the splits test"):
        list(rows.read(folder.parent))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ConfigError, match="not a readable Parquet file"):
        list(rows.read(tmp_path / "bad.parquet"))


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ConfigError, match=r"need pyarrow: pip install .jetspec_jax\[data\]"):
        list(rows.read(tmp_path / "a.parquet"))


# ---- what is learnt


def build(values, longest=64, text="all", tokenizer=None):
    given = [rows.Row(f"f:{i}", str(i), v) for i, v in enumerate(values)]
    return examples.build(given, tokenizer or Letters(), (1,), longest, None, text)


def shown(example):
    """Learnt characters in capitals' place: themselves, all others as dots."""
    return "".join(ALPHABET[t] if k else "." for t, k in zip(example.tokens, example.learnt, strict=True))


def test_only_what_the_assistant_says_is_learnt():
    kept, report = build(
        [
            {"messages": [user("hi"), answer("yes")]},
            {"prompt": "hi", "response": "no"},
            {"messages": [{"role": "system", "content": "s"}, user("a"), answer("bc"), user("d"), answer("ef")]},
            {"text": "plain"},
            {"messages": [user("a"), answer("bc"), user("and then")]},
        ]
    )
    assert [shown(e) for e in kept] == [".....yes$", ".....no$", ".......bc$....ef$", "plain", "....bc$"]
    assert report.lines() == ["data: 5 rows read, 5 used, 0 dropped"]


BAD = [
    ({"messages": []}, "no messages"),
    ({"messages": [{"role": "system", "content": "s"}]}, "a system message alone"),
    ({"messages": [user("a"), user("b"), answer("cd")]}, "two turns of one speaker in a row"),
    ({"messages": [answer("ab"), user("b")]}, "the assistant speaks first"),
    ({"messages": [user("a"), {"role": "assistant"}]}, "a message without content"),
    ({"messages": [user("a"), answer(None)]}, "a message without content"),
    ({"messages": [user("a"), answer("  ")]}, "a message without content"),
    ({"messages": None}, "neither messages, prompt and response, nor text"),
    ({"messages": "hi"}, "messages is no list"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "a role other than system, user and assistant"),
    ({"messages": [user("a")]}, "no assistant turn"),
    ({"prompt": "a", "response": None}, "no assistant turn"),
    ({"text": ""}, "a text without content"),
    ([1, 2], "not a JSON object"),
    (None, "not a JSON object"),
]


@pytest.mark.parametrize(("value", "reason"), BAD, ids=[r for _, r in BAD])
def test_rows_that_give_nothing_are_counted_by_reason(value, reason):
    good = {"prompt": "hi", "response": "yes"}
    kept, report = build([good, value, good])
    assert len(kept) == 2 and report.dropped == {reason: 1} and report.read == report.used + report.dropped.total()
    assert reason in report.lines()[1] and "f:1" in report.lines()[1]


def test_limits_of_length_are_exact():
    row = {"prompt": "hi", "response": "yes"}  # @hi$>yes$ has 9 tokens, 4 of them learnt
    kept, report = build([row], longest=9)
    assert kept[0].tokens.size == 9 and not report.truncated
    kept, report = build([row], longest=7)
    assert kept[0].tokens.size == 7 and report.truncated == 1
    long = {"prompt": "h" * 20, "response": "yes"}
    _, report = build([row, long], longest=9)
    assert report.dropped == {"the answer begins behind the sequence length": 1}
    _, report = build([row, long], longest=24)  # one answer token before the cut: no label
    assert report.dropped == {"the answer begins behind the sequence length": 1}
    assert len(build([row, long], longest=25)[0]) == 2
    kept, _ = build([{"prompt": "hi", "response": "y"}])  # one token and the end token
    assert shown(kept[0]) == ".....y$"
    _, report = build([row, {"text": "x"}])
    assert report.dropped == {"an answer of one token": 1}


def test_a_wrong_template_stops_with_an_example():
    with pytest.raises(ConfigError, match=r"2 of 2 samples have no supervised token .*example: f:0: .*assistant. hi"):
        build([{"text": "[assistant] hi"}] * 2, text="assistant")
    kept, _ = build([{"text": "@a$>bc$@d$>ef$"}], text="assistant")
    assert shown(kept[0]) == "....bc$....ef$"
    with pytest.raises(ConfigError, match="the data set is empty"):
        build([])
    with pytest.raises(ConfigError, match="no tokenizer"):
        examples.build([], None, (), 8, None, "all")


class Forgetful(Letters):
    """Writes earlier answers without what was thought, and a mark before the last, as Qwen3's template does."""

    def render_chat(self, messages, thinking=None, answer_follows=True):
        text = ""
        for i, m in enumerate(messages):
            said = m["content"]
            if m["role"] == "assistant":
                thought, _, said = said.rpartition("</think>")
                said = f"0{thought}0" + said if i == len(messages) - 1 else said
            text += {"system": "<", "user": "@", "assistant": ">"}[m["role"]] + said + "$"
        return text + (">00" if answer_follows and thinking is False else ">" * answer_follows)


def test_templates_that_rewrite_earlier_turns():
    value = {"messages": [user("a"), answer("bc"), user("d"), answer("ef")]}
    given = [rows.Row("f:0", "0", value)]
    kept, _ = examples.build(given, Forgetful(), (1,), 64, False, "all")
    assert shown(kept[0]) == "....bc$......ef$"
    value = {"messages": [user("a"), answer("ef is it</think>ef")]}
    kept, _ = examples.build([rows.Row("f:0", "0", value)], Forgetful(), (1,), 64, True, "all")
    assert shown(kept[0]).endswith("0ef$") and shown(kept[0]).startswith("....0ef is it")


# ---- batches


def test_batches_by_number_and_shares_of_processes():
    packed = packing.pack(random_examples(60), 24)
    count = len(packed.tokens)
    data = Batches(packed, 4, 2, seed=1)
    assert data[3].tokens.shape == (2, 2, 24) and (data[3].rows == data[3].rows).all()
    epoch = np.concatenate([data[i].rows.ravel() for i in range(-(-count // 4))])
    assert sorted(epoch[:count]) == list(range(count))
    np.testing.assert_array_equal(data[5].tokens[0, 0], packed.tokens[data[5].rows[0, 0]])
    shares = [Batches(packed, 4, 1, seed=1, process=p, processes=2)[3].rows.ravel() for p in range(2)]
    assert sorted(np.concatenate(shares)) == sorted(data[3].rows.ravel())
    names = data.identities(3)
    assert set(names) == {n for r in data[3].rows.ravel() for n in packed.identities[r]} and data.anchored(3)
    with pytest.raises(ValueError, match="does not split"):
        Batches(packed, 5, 2, seed=1)
    silent = Batches(packed._replace(learnt=np.zeros_like(packed.learnt)), 4, 2, seed=1)
    assert not silent.anchored(0)


def test_anchors_are_looked_for_once_and_not_at_every_step(monkeypatch):
    data = Batches(packing.pack(random_examples(60), 24), 4, 2, seed=1)
    monkeypatch.setattr(packing.Packed, "anchored", property(lambda self: pytest.fail("looked for again")))
    assert data.anchored(0) and data.anchored(1)


# ---- the pool


def prompt_sets(tmp_path):
    problem = "A farmer has twelve sheep and buys five more of them every single week until his small barn is full"
    files = {
        "gsm8k/train.jsonl": [
            {"question": "How much is two and two?", "answer": "four"},
            {"question": problem + ". How many?", "answer": "1"},
        ],
        "math_train/train.jsonl": [{"problem": "Find $x$."}, {"problem": "Find  $x$!"}],
        "mbpp/rest.jsonl": [{"text": "Write a function to add.", "test_list": ["assert add(1, 2) == 3"]}],
        "math500/test.jsonl": [{"unique_id": "a", "problem": "Once " + problem + ". Guess."}],
    }
    for name in formats.BENCHMARKS.values():
        files.setdefault(name.file, [])
    for name, values in files.items():
        write(tmp_path / name, values)
    return tmp_path


def test_pool_holds_no_benchmark_row_and_repeats_itself(tmp_path, monkeypatch):
    prompt_sets(tmp_path)
    monkeypatch.setattr(code_prompts, "LICENCES", {"toolz": "BSD-3-Clause", "not-installed": "MIT"})
    found, counts = pool.build(tmp_path, code=20, per_package=30, chat_prompts=40)
    assert counts["sources"]["gsm8k_train"] == 1 and counts["sources"]["math_train"] == 1
    assert counts["dropped"] == {"gsm8k_train": 1, "math_train": 1} and 30 < counts["total"] < 80
    texts = [row["messages"][0]["content"] for row in found]
    assert len(set(texts)) == len(texts) and not any("farmer" in text for text in texts)
    assert pool.build(tmp_path, code=20, per_package=30, chat_prompts=40)[0] == found
    assert all(len(row["messages"]) == 1 for row in found)
    answered, _ = pool.build(tmp_path, code=0, per_package=1, chat_prompts=0, answers=True)
    said = {row["id"]: row["messages"][-1] for row in answered}
    assert said["gsm8k_train/0"] == answer("four") and said["math_train/0"]["role"] == "user"


def test_the_pool_is_written_whole_and_mistakes_are_noticed_first(tmp_path, monkeypatch, capsys):
    collected = []
    monkeypatch.setattr(code_prompts, "collect", lambda most: collected.append(most) or [])
    prompt_sets(tmp_path)
    out = tmp_path / "x.jsonl"
    base = [f"--data={tmp_path}", f"--out={out}", "--chat=3"]
    for more, message in [
        ([f"--out={tmp_path / 'nodir' / 'x.jsonl'}"], f"there is no folder {tmp_path / 'nodir'}; make it first"),
        ([f"--out={tmp_path}"], "a folder; give the name of a file"),
        (["--code=-5"], "--code=-5: give a number >= 0"),
        (["--chat=-1"], "--chat=-1: give a number >= 0"),
        (["--per_package=0"], "--per_package=0: give a number >= 1"),
        ([f"--data={tmp_path / 'nowhere'}"], "no such file; give the folder that holds the prompt sets"),
    ]:
        assert pool.main([*base, *more]) == 1
        err = capsys.readouterr().err
        assert err.startswith("pool: ") and message in err and err.count("\n") == 1
    assert pool.main([*base, "--code=0"]) == 0 and not collected
    before = out.read_text()

    def half(path, found):
        path.write_text("half")
        raise OSError("no space left")

    monkeypatch.setattr(formats, "write", half)
    assert pool.main([*base, "--code=1"]) == 1 and out.read_text() == before and collected == [600]


def test_functions_are_read_from_source(tmp_path):
    path = tmp_path / "m.py"
    path.write_text(SOURCE)
    lift, twice = code_prompts._functions("p", path)
    assert (
        lift.code == 'class Box:\n    def lift(self, n: int=1) -> int:\n        """Lift the box by n units, slowly."""'
    )
    assert twice.tests == ["assert twice(2) == 4"] and "return" not in twice.code
    assert "twice" in code_prompts.prompt(twice)


def test_prompt_files(tmp_path, capsys):
    (tmp_path / "gsm8k").mkdir()
    formats.write(tmp_path / "gsm8k/test.jsonl", [{"question": "1 + 1?"}])
    out = tmp_path / "out.jsonl"
    assert formats.main(["gsm8k", str(tmp_path), str(out)]) == 0
    expected = "1 + 1?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert formats.read(out) == [{"id": "gsm8k/0", "messages": [{"role": "user", "content": expected}]}]
    assert (
        formats.main(["gsm9k", str(tmp_path), str(out)]) == 2 and formats.main(["mbpp", str(tmp_path), str(out)]) == 1
    )
    assert "no such file" in capsys.readouterr().err
