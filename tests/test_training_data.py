"""Training data: benchmark prompts, the pool of training prompts, and the options of a run."""

import pathlib

import pytest

from jetspec_jax.config import ConfigError
from jetspec_jax.evals import prompts
from jetspec_jax.training import code_prompts, options, pipeline, pool

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


def test_pool_holds_no_benchmark_row_and_repeats_itself(tmp_path, monkeypatch):
    problem = "A farmer has twelve sheep and buys five more of them every single week until his small barn is full"
    files = {
        "gsm8k/train.jsonl": [{"question": "How much is two and two?"}, {"question": problem + ". How many?"}],
        "math_train/train.jsonl": [{"problem": "Find $x$."}, {"problem": "Find  $x$!"}],
        "mbpp/rest.jsonl": [{"text": "Write a function to add.", "test_list": ["assert add(1, 2) == 3"]}],
        "math500/test.jsonl": [{"unique_id": "a", "problem": "Once " + problem + ". Guess."}],
    }
    for name in prompts.BENCHMARKS.values():
        files.setdefault(name.file, [])
    for name, rows in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        prompts.write(tmp_path / name, rows)
    monkeypatch.setattr(code_prompts, "LICENCES", {"toolz": "BSD-3-Clause", "not-installed": "MIT"})
    rows, counts = pool.build(tmp_path, code=20, per_package=30, chat_prompts=40)
    assert counts["sources"]["gsm8k_train"] == 1 and counts["sources"]["math_train"] == 1
    assert counts["dropped"] == {"gsm8k_train": 1, "math_train": 1} and 30 < counts["total"] < 80
    texts = [row["messages"][0]["content"] for row in rows]
    assert len(set(texts)) == len(texts) and not any("farmer" in text for text in texts)
    assert pool.build(tmp_path, code=20, per_package=30, chat_prompts=40)[0] == rows


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
    prompts.write(tmp_path / "gsm8k/test.jsonl", [{"question": "1 + 1?"}])
    out = tmp_path / "out.jsonl"
    assert prompts.main(["gsm8k", str(tmp_path), str(out)]) == 0
    expected = "1 + 1?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert prompts.read(out) == [{"id": "gsm8k/0", "messages": [{"role": "user", "content": expected}]}]
    assert (
        prompts.main(["gsm9k", str(tmp_path), str(out)]) == 2 and prompts.main(["mbpp", str(tmp_path), str(out)]) == 1
    )
    assert "no such file" in capsys.readouterr().err


def test_options_name_the_nearest_key(tmp_path):
    path = tmp_path / "c.py"
    path.write_text(
        "import ml_collections\ndef get_config():\n  return ml_collections.ConfigDict(dict(steps=1, lr=0.1, on=True))\n"
    )
    base = ["--config", str(path), "--workdir=w"]
    config, workdir = options.parse([*base, "--config.steps=7", "--config.on", "false"])
    assert (config.steps, config.on, config.lr, str(workdir)) == (7, False, 0.1, "w")
    for wrong, message in [
        ("--config.stepz=3", r"did you mean --config\.steps"),
        ("--config.steps=x", "a int is needed"),
        ("--wordkir=x", "did you mean --workdir"),
    ]:
        with pytest.raises(ConfigError, match=message):
            options.parse([*base, wrong])
    demo = options.load(pathlib.Path("configs/demo.py"))
    pipeline.check(demo)
    for key, value, message in [("until", "x", "choose one of pool"), ("steps", 0, "steps=0: give a number >= 1")]:
        with pytest.raises(ConfigError, match=message):
            pipeline.check(type(demo)({**demo.to_dict(), key: value}))
