"""The pool of prompts and where its rows come from."""

from jetspec_jax.evals import formats
from jetspec_jax.training.data import code_prompts, pool

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
        (tmp_path / name).parent.mkdir(exist_ok=True)
        formats.write(tmp_path / name, values)
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
    assert said["gsm8k_train/0"] == {"role": "assistant", "content": "four"} and said["math_train/0"]["role"] == "user"


def test_the_pool_is_written_whole_and_mistakes_are_noticed_first(tmp_path, monkeypatch, capsys):
    collected = []
    monkeypatch.setattr(code_prompts, "collect", lambda most: collected.append(most) or [])
    prompt_sets(tmp_path)
    out = tmp_path / "x.jsonl"
    base = [f"--data={tmp_path}", f"--out={out}", "--chat=3"]
    for more, message in [
        ([f"--out={tmp_path / 'nodir' / 'x.jsonl'}"], f"there is no folder {tmp_path / 'nodir'}; make it first"),
        ([f"--out={tmp_path}"], "a folder; give the name of a file"),
        (["--code=-5"], "--code=-5: give a whole number >= 0"),
        (["--chat=-1"], "--chat=-1: give a whole number >= 0"),
        (["--per_package=0"], "--per_package=0: give a whole number >= 1"),
        ([f"--data={tmp_path / 'nowhere'}"], "no such file; give the folder that holds the prompt sets"),
    ]:
        assert pool.main([*base, *more]) == (2 if ": give a whole" in message else 1)
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
