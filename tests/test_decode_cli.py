"""`decode.py` as users call it: parity with the published engine, output formats, and one line for every mistake."""

import json
import pathlib

import numpy as np
import pytest
from absl.testing import flagsaver

import decode
from jetspec_jax import speculate

FIXTURES = pathlib.Path(__file__).parent / "fixtures" / "peer_parity"
PAIR = FIXTURES / "dense_causal"


@pytest.fixture(autouse=True)
def no_files_written(monkeypatch, tmp_path):
    monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path / "cache"))


def run(capsys, *args) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one call."""
    with flagsaver.flagsaver():
        try:
            status = decode.main(["decode.py", *map(str, args)])
        except SystemExit as stop:
            status = stop.code
    out, err = capsys.readouterr()
    return status, out, err


def pair(folder=PAIR):
    return "--target", folder / "target", "--head", folder / "head"


def ids(prompt):
    return "--prompt_ids", ",".join(map(str, prompt))


CASES = [
    pytest.param(folder, i, id=f"{folder.name}-{i}")
    for folder in sorted(FIXTURES.iterdir())
    for i in range(len(json.loads((folder / "expected.json").read_text())["cases"]))
]


@pytest.mark.parametrize(("folder", "index"), CASES)
def test_parity_with_the_published_engine(folder, index, capsys, tmp_path):
    expected = json.loads((folder / "expected.json").read_text())
    arrays = np.load(folder / "expected.npz")
    case, settings = expected["cases"][index], expected["settings"]
    common = (*ids(case["prompt"]), "--max_new_tokens", settings["max_new_tokens"], "--json")

    status, out, _ = run(capsys, "--target", folder / "target", "--method", "autoregressive", *common)
    assert status == 0
    assert json.loads(out)["token_ids"] == case["autoregressive"]

    chain = "--tree", "accum_logp", "--width", 1, "--budget", settings["block_size"]
    _, out, _ = run(capsys, *pair(folder), *common, *chain)
    got = json.loads(out)
    assert got["token_ids"] == case["chain"]["token_ids"]
    assert got["new_tokens"] / got["rounds"] == pytest.approx(case["chain"]["tokens_per_forward"])

    for budget, tree in case["tree"].items():
        trace = tmp_path / f"{budget}.npz"
        _, out, _ = run(capsys, *pair(folder), *common, "--tree=accum_logp", f"--budget={budget}", f"--trace={trace}")
        got = json.loads(out)
        assert got["token_ids"] == tree["token_ids"] == case["autoregressive"]
        assert got["accept_lengths"] == tree["accept_lengths"]
        assert got["tree_sizes"] == tree["tree_sizes"]
        assert 1 + sum(got["emitted"]) == got["new_tokens"]
        traced = np.load(trace)
        for r in range(min(3, got["rounds"])):
            theirs = {k: arrays[f"p{index}_b{budget}_round{r}_{k}"] for k in ("draft_logits", "tree_tokens")}
            ours = traced[f"round{r}_draft_logits"]
            limit = 1e-4 * np.abs(theirs["draft_logits"]).max()
            np.testing.assert_allclose(ours, theirs["draft_logits"], rtol=0, atol=limit)
            for key in ("tokens", "parents", "depths"):
                want = arrays[f"p{index}_b{budget}_round{r}_tree_{key}"]
                np.testing.assert_array_equal(traced[f"round{r}_tree_{key}"], want)
            path = traced[f"round{r}_accepted"]
            assert path[0] == 0
            assert len(path) == got["accept_lengths"][r]


def test_compare_reports_both_rates(capsys):
    status, out, _ = run(
        capsys, *pair(), *ids([11, 12, 17]), "--max-new-tokens", 12, "--compare", "--json", "--budget=16"
    )
    report = json.loads(out)["compare"]
    assert status == 0
    assert report["equal"] is True
    assert report["first_difference"] is None
    assert report["speedup"] > 0
    assert report["plain_tokens_per_second"] > 0


def test_sampling_gives_the_same_tokens_with_and_without_a_draft(capsys):
    common = (*ids([11, 12, 17]), "--max_new_tokens=20", "--temperature=1", "--seed=7", "--json")
    _, plain, _ = run(capsys, "--target", PAIR / "target", "--method=autoregressive", *common)
    _, tree, _ = run(capsys, *pair(), "--budget=16", *common)
    assert json.loads(plain)["token_ids"] == json.loads(tree)["token_ids"]


def test_dflash_is_the_chain_of_a_bidirectional_head(capsys):
    folder = FIXTURES / "dense_bidirectional"
    case = json.loads((folder / "expected.json").read_text())["cases"][0]
    common = (*ids(case["prompt"]), "--max_new_tokens=48", "--json", "--method=dflash")
    status, out, _ = run(capsys, *pair(folder), *common)
    assert status == 0
    assert json.loads(out)["token_ids"] == case["chain"]["token_ids"]
    status, _, err = run(capsys, *pair(), *common)
    assert status == 1
    assert "causal head" in err


def test_prompt_ids_are_printed_and_chunks_change_nothing(capsys):
    """FC-61: the ids that were decoded; and a prompt read in chunks of 5."""
    prompt = [11, 12, 17, 3, 9, 40, 2, 8, 8, 1, 20, 30, 31, 33, 7, 6, 5]
    common = (*pair(), *ids(prompt), "--max_new_tokens=12", "--json", "--budget=16")
    whole, pieces = (json.loads(run(capsys, *common, *more)[1]) for more in ([], ["--prefill-chunk=5"]))
    assert whole["prompt_ids"] == pieces["prompt_ids"] == prompt
    assert whole["token_ids"] == pieces["token_ids"]
    assert pieces["settings"]["prefill_chunk"] == 5 and pieces["settings"]["thinking"] is None


def test_max_new_tokens_zero_gives_empty_lists(capsys):
    status, out, _ = run(capsys, *pair(), *ids([5]), "--max_new_tokens=0", "--json", "--budget=16")
    got = json.loads(out)
    assert status == 0
    assert got["token_ids"] == got["accept_lengths"] == got["emitted"] == got["tree_sizes"] == []
    assert got["finish_reason"] == "length"


def test_prompt_file_needs_a_tokenizer_here_and_says_so(capsys, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": 3, "prompt": "hello"}\n')
    status, _, err = run(capsys, *pair(), "--prompt_file", file)
    assert status == 1
    assert "no tokenizer" in err


FLAG_MISTAKES = [
    (["--promt", "x"], "did you mean --prompt"),
    (["--prompt", "x", "--budgt=3"], "did you mean --budget"),
    ([], "no prompt"),
    (["--prompt", ""], "empty"),
    (["--prompt", "x", "--prompt_ids", "1"], "give one of"),
    (["--prompt", "x", "--budget", "0"], "budget=0"),
    (["--prompt", "x", "--width", "-1"], "width=-1"),
    (["--prompt", "x", "--depth", "0"], "depth=0"),
    (["--prompt", "x", "--max_new_tokens", "-1"], "max_new_tokens=-1"),
    (["--prompt", "x", "--max_new_tokens", "many"], "max_new_tokens"),
    (["--prompt", "x", "--temperature", "nan"], "temperature=nan"),
    (["--prompt", "x", "--temperature", "inf"], "temperature=inf"),
    (["--prompt", "x", "--temperature", "-1"], "temperature=-1"),
    (["--prompt", "x", "--seed", "-1"], "seed=-1"),
    (["--prompt", "x", "--tree", "oak"], "tree"),
    (["--prompt", "x", "--method", "medusa"], "method"),
    (["--prompt", "x", "--method", "autoregressive", "--budget", "8"], "contradicts"),
    (["--prompt", "x", "--method", "dflash", "--tree", "best_first"], "contradicts"),
    (["--prompt", "x", "--json", "--stream"], "contradicts"),
    (["--prompt", "x", "--target", "t"], "--head"),
    (["--prompt_ids", "1", "--chat"], "--chat"),
    (["--prompt_file", "f", "--trace", "t"], "--trace"),
    (["a prompt"], "--prompt"),
    (["--prompt", "x", "--notarget"], "no such flag"),
    (["--prompt", "x", "--budget", "100000"], "1..1024"),
    (["--prompt_ids", "1,x"], "--prompt_ids='1,x'"),
    (["--prompt_ids", ""], "--prompt_ids=''"),
    (["--prompt_ids", "1,-1"], "whole numbers"),
    (["--prompt_ids", "1", "--nothinking"], "--nothinking with --prompt_ids"),
    (["--prompt", "x", "--nochat", "--thinking"], "--thinking with --nochat"),
    (["--prompt", "x", "--thinkng"], "did you mean --thinking"),
    (["--prompt", "x", "--prefill_chunk", "0"], "--prefill_chunk=0"),
]


@pytest.mark.parametrize(("args", "message"), FLAG_MISTAKES)
def test_wrong_flags_end_with_status_2_and_one_line(args, message, capsys):
    status, out, err = run(capsys, *args)
    assert status == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_wrong_files_end_with_status_1_and_one_line(capsys, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"prompt": "caf\xe9"}\n')
    lines = [
        ('{"prompt": 3}', "must be text"),
        ('{"messages": "x"}', "must be text"),
        ('{"prompt": "x", "messages": []}', "give"),
        ('{"prompt": "x", "top_q": 3}', "unknown key 'top_q'"),
        ('{"prompt": "x", "max_new_tokens": -2}', "max_new_tokens=-2"),
        ('{"prompt": "x", "temperature": "hot"}', "temperature"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ]
    cases = [
        ([*pair(), "--prompt_ids", "64"], "0..63"),
        ([*pair(), "--prompt_ids", "1", "--depth", "9", "--budget", "16"], "depth=9"),
        ([*pair(), "--prompt_ids", "1", "--depth", "9", "--budget", "1"], "depth=9"),
        ([*pair(), "--prompt_ids", "1", "--max_new_tokens", "4096"], "4096"),
        ([*pair(), "--prompt", "x"], "no tokenizer"),
        ([*pair(), "--prompt", "x", "--thinking"], "thinking=True"),
        ([*pair(), "--prompt_file", empty], "no prompt"),
        ([*pair(), "--prompt_file", tmp_path / "none.jsonl"], "none.jsonl"),
        ([*pair(), "--prompt_file", latin], "not UTF-8"),
        ([*pair(), "--prompt_ids", "1", "--trace", tmp_path / "no" / "t.npz"], "t.npz"),
        (["--target", tmp_path / "none", "--head", PAIR / "head", "--prompt_ids", "1"], "none"),
        (["--target", PAIR / "head", "--head", PAIR / "head", "--prompt_ids", "1"], "head"),
        (["--target", PAIR / "target", "--head", PAIR / "target", "--prompt_ids", "1"], "dflash_config"),
    ]
    for n, (line, message) in enumerate(lines):
        file = tmp_path / f"{n}.jsonl"
        file.write_text(line)
        cases.append(([*pair(), "--prompt_file", file], message))
    for args, message in cases:
        status, out, err = run(capsys, *args)
        assert status == 1, (args, err)
        assert out == ""
        last = err.strip().splitlines()[-1]
        assert message in last, (args, err)
        assert "Traceback" not in err


def test_help_lists_the_flags(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for flag in ("--target", "--prompt_file", "--budget", "--trace", "--[no]compare"):
        assert flag in out


def test_no_prompt_is_decoded_before_all_are_checked(capsys, tmp_path, monkeypatch):
    """The second line asks for more than the target's context; nothing of the first appears."""
    monkeypatch.setattr(speculate, "prompt_ids", lambda *_: [5])
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "max_new_tokens": 100000}\n')
    args = ("--target", PAIR / "target", "--method=autoregressive", "--prompt_file", file, "--json")
    status, out, err = run(capsys, *args, "--max_new_tokens=2")
    assert (status, out) == (1, "")
    assert "p.jsonl:2: max_new_tokens=100000" in err
