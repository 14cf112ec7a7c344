"""`decode.py` as users call it: parity with the published engine, output formats, and one line for every mistake."""

import dataclasses
import io
import json
import pathlib
import shutil
import xml.etree.ElementTree

import bpe
import numpy as np
import pytest

import decode
from jetspec_jax.evals import draw, trace
from jetspec_jax.files import load, prompts

FIXTURES = pathlib.Path(__file__).parent / "fixtures" / "peer_parity"
PAIR = FIXTURES / "dense_causal"


@pytest.fixture(autouse=True)
def no_files_written(monkeypatch, tmp_path):
    monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path / "cache"))


def run(capsys, *args) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one call."""
    status = decode.main(list(map(str, args)))
    out, err = capsys.readouterr()
    return status, out, err


def pair(folder=PAIR):
    return "--target", folder / "target", "--head", folder / "head"


def ids(prompt):
    return "--prompt_ids", ",".join(map(str, prompt))


CASES = [
    pytest.param(
        folder, i, id=f"{folder.name}-{i}", marks=pytest.mark.slow if i or "bidirectional" in folder.name else ()
    )
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


@pytest.mark.slow  # as test_lossless does without the command
def test_sampling_gives_the_same_tokens_with_and_without_a_draft(capsys):
    common = (*ids([11, 12, 17]), "--max_new_tokens=20", "--temperature=1", "--seed=7", "--json")
    _, plain, _ = run(capsys, "--target", PAIR / "target", "--method=autoregressive", *common)
    _, tree, _ = run(capsys, *pair(), "--budget=16", *common)
    assert json.loads(plain)["token_ids"] == json.loads(tree)["token_ids"]


def test_all_options_give_the_tokens_of_plain_decoding(capsys):
    common = (*ids([11, 12, 17]), "--max_new_tokens=24", "--temperature=1", "--seed=7", "--json", "--logprobs")
    common += ("--top_k=20", "--top_p=0.95", "--min_p=0.01", "--repetition_penalty=1.2", "--presence_penalty=0.3")
    common += ("--frequency_penalty=0.1", "--logit_bias=5:1.5,7:-100", "--min_new_tokens=4", "--stop_token_ids=9,10")
    status, out, _ = run(capsys, *pair(), "--budget=8", "--ignore_eos", "--compare", *common)
    got = json.loads(out)
    assert status == 0 and got["compare"]["equal"]
    assert len(got["logprobs"]) == got["new_tokens"] and max(got["logprobs"]) <= 0 and 7 not in got["token_ids"]
    assert got["settings"]["top_p"] == 0.95 and got["settings"]["ignore_eos"] is True


@pytest.fixture
def speaking(tmp_path):
    """The pair with a tokenizer: its 64 ids are three special tokens and characters."""
    target = tmp_path / "target"
    shutil.copytree(PAIR / "target", target, copy_function=shutil.copyfile)
    bpe.make(target, template=None)
    return "--target", target, "--head", PAIR / "head"


def test_stop_strings_and_streams(capsys, speaking):
    common = (*speaking, *ids([11, 12, 17]), "--max_new_tokens=24", "--budget=16", "--ignore_eos")
    text = json.loads(run(capsys, *common, "--json")[1])["text"]
    stop = text[6:8]
    cut = text[: text.index(stop)]
    status, out, _ = run(capsys, *common, "--json", f"--stop={stop}", "--stop=never", "--compare")
    got = json.loads(out)
    assert (status, got["text"], got["finish_reason"], got["stopped_by"]) == (0, cut, "stop", stop)
    assert got["compare"]["equal"]
    assert run(capsys, *common, f"--stop={stop}", "--include_stop_text")[1] == cut + stop + "\n"
    assert run(capsys, *common, f"--stop={stop}", "--nostream")[1] == cut + "\n"


def test_rows_of_a_file_have_options_of_their_own(capsys, speaking, tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "prompt_ids", lambda target, prompt, chat=None, thinking=None: [11, 12, 17])
    use = {"top_p": 0.9, "logit_bias": {"5": 100.0}, "bad_words": [[40], [41, 42]]}  # two programs for three rows
    given = [
        {"max_new_tokens": 9},
        use | {"temperature": 1.0, "seed": 3, "budget": 5, "logit_bias": {"6": -1}, "stop_token_ids": [63]},
        use | {"stop_token_ids": [5], "include_stop_text": True},
    ]
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"id": i, "prompt": "x"} | o) + "\n" for i, o in enumerate(given)))
    common = ("--prompt_file", file, "--json", "--max_new_tokens=12", "--ignore_eos")
    status, out, _ = run(capsys, *speaking, "--budget=8", *common)
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [row["id"] for row in rows] == [0, 1, 2]
    assert rows[0]["new_tokens"] == 9 and rows[1]["settings"]["temperature"] == 1 and 40 not in rows[1]["token_ids"]
    assert [row["settings"]["budget"] for row in rows] == [8, 5, 8] and max(rows[1]["tree_sizes"]) == 5
    assert rows[2]["stopped_by"] == 5 == rows[2]["token_ids"][0] and rows[2]["new_tokens"] == 1
    status, _, err = run(capsys, *speaking[:2], "--method=autoregressive", *common)
    assert status == 1 and "p.jsonl:2: budget contradicts --method autoregressive" in err


def test_dflash_is_the_chain_of_a_bidirectional_head(capsys):
    folder = FIXTURES / "dense_bidirectional"
    case = json.loads((folder / "expected.json").read_text())["cases"][0]
    common = (*ids(case["prompt"]), "--max_new_tokens=48", "--json", "--method=dflash")
    status, out, _ = run(capsys, *pair(folder), *common)
    assert status == 0
    assert json.loads(out)["token_ids"] == case["chain"]["token_ids"]
    status, _, err = run(capsys, *pair(), *common)
    assert status == 1
    assert "is jetspec; use --method jetspec" in err


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


def test_lines_of_token_ids_need_no_tokenizer(capsys, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt_ids": [3, 1, 4]}\n{"prompt_ids": [5], "max_new_tokens": 2, "id": "b"}\n')
    status, out, _ = run(capsys, *pair(), "--prompt_file", file, "--json", "--max_new_tokens=4", "--ignore_eos")
    first, second = map(json.loads, out.splitlines())
    assert status == 0 and first["prompt_ids"] == [3, 1, 4] and first["new_tokens"] == 4
    assert second["id"] == "b" and second["new_tokens"] == 2 and second["settings"]["thinking"] is None
    file.write_text('{"prompt_ids": [true]}\n')
    status, _, err = run(capsys, *pair(), "--prompt_file", file)
    assert status == 1 and "prompt_ids a list of ids" in err


def test_text_that_a_terminal_cannot_show_is_escaped(capsys, monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", narrow)
    assert run(capsys, "--prompt_ids=x")[0] == 2
    print("早", file=narrow, flush=True)
    assert narrow.buffer.getvalue() == b"\\u65e9\n"


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
    (["--prompt_ids", "1", "--nochat"], "--nochat with"),
    (["--prompt_file", "f", "--trace", "t"], "--trace"),
    (["a prompt"], "--prompt"),
    (["--prompt", "x", "--notarget"], "no such option"),
    (["--prompt", "x", "--budget", "100000"], "1..1024"),
    (["--prompt_ids", "1,x"], "--prompt_ids='1,x'"),
    (["--prompt_ids", ""], "--prompt_ids=''"),
    (["--prompt_ids", "1,-1"], "whole numbers"),
    (["--prompt", "x", "--top_p", "0"], "top_p=0"),
    (["--prompt", "x", "--top_k", "-1"], "top_k=-1"),
    (["--prompt", "x", "--min-p", "2"], "min_p=2"),
    (["--prompt", "x", "--repetition_penalty", "0"], "repetition_penalty=0"),
    (["--prompt", "x", "--presence_penalty", "inf"], "presence_penalty=inf"),
    (["--prompt", "x", "--logit_bias", "3"], "TOKEN_ID:NUMBER"),
    (["--prompt", "x", "--logit_bias", "3:1,3:2"], "each id once"),
    (["--prompt", "x", "--stop_token_ids", "a"], "--stop_token_ids='a'"),
    (["--prompt", "x", "--stop", ""], "stop"),
    (["--prompt", "x", "--bad_words", ""], "bad_words"),
    (["--prompt", "x", "--min_new_tokens", "9", "--max_new_tokens", "8"], "min_new_tokens=9 contradicts"),
    (["--prompt", "x", "--logprobs"], "--json"),
    (["--prompt", "x", "--sharpness", "-1"], "sharpness=-1"),
    (["--prompt", "x", "--method", "autoregressive", "--sharpness", "1"], "contradicts"),
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
        ('{"prompt": "x", "top_p": 7}', "top_p=7"),
        ('{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias"),
        ('{"prompt": "x", "min_new_tokens": 300}', "min_new_tokens=300 contradicts max_new_tokens=256"),
        ('{"prompt": "x", "logprobs": true}', "--json"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ]
    cases = [
        ([*pair(), "--prompt_ids", "64"], "0..63"),
        ([*pair(), "--prompt_ids", "1", "--depth", "9", "--budget", "16"], "depth=9"),
        ([*pair(), "--prompt_ids", "1", "--depth", "9", "--budget", "1"], "depth=9"),
        ([*pair(), "--prompt_ids", "1", "--max_new_tokens", "4096"], "4096"),
        ([*pair(), "--prompt", "x"], "no tokenizer"),
        ([*pair(), "--prompt_ids", "1", "--stop", "x"], "stop='x'"),
        ([*pair(), "--prompt_ids", "1", "--bad_words", "x"], "bad_words='x'"),
        ([*pair(), "--prompt_ids", "1", "--stop_token_ids", "64"], "stop_token_ids: 64"),
        ([*pair(), "--prompt_ids", "1", "--logit_bias", "99:1"], "logit_bias: 99"),
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
    monkeypatch.setattr(prompts, "prompt_ids", lambda *_: [5])
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "max_new_tokens": 100000}\n')
    args = ("--target", PAIR / "target", "--method=autoregressive", "--prompt_file", file, "--json")
    status, out, err = run(capsys, *args, "--max_new_tokens=2")
    assert (status, out) == (1, "")
    assert "p.jsonl:2: max_new_tokens=100000" in err


def rows(tmp_path, *given):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in given))
    return "--prompt_file", file


@pytest.mark.slow  # batches equal single rows in test_lossless and test_engine
def test_batches_give_every_row_what_it_has_alone_in_the_order_of_the_file(capsys, tmp_path):
    given = [
        {"id": "a", "prompt_ids": [11, 12, 17], "logprobs": True},
        {"id": "b", "prompt_ids": [5], "max_new_tokens": 3, "budget": 4},
        {"id": "c", "prompt_ids": [3, 9, 40, 2, 8], "temperature": 1.0, "seed": 7, "repetition_penalty": 1.2},
        {"id": "d", "prompt_ids": [1] * 20, "max_new_tokens": 0},
    ]
    common = (
        *pair(),
        *rows(tmp_path, *given),
        "--json",
        "--max_new_tokens=12",
        "--budget=8",
        "--ignore_eos",
    )
    alone, together = (
        [json.loads(line) for line in run(capsys, *common, f"--batch={n}")[1].splitlines()] for n in (1, 2)
    )
    assert [row["id"] for row in together] == list("abcd") and together[0]["settings"]["batch"] == 2
    for key in ("token_ids", "accept_lengths", "tree_sizes", "emitted", "finish_reason", "prompt_ids", "rounds"):
        assert [row[key] for row in together] == [row[key] for row in alone]
    assert together[0]["logprobs"] == pytest.approx(alone[0]["logprobs"], abs=1e-4) and together[1]["logprobs"] is None


def test_the_method_is_the_heads_family_unless_a_tree_is_asked_for(capsys, tmp_path):
    folder = FIXTURES / "dense_bidirectional"
    common = (*pair(folder), "--max_new_tokens=9", "--json", "--ignore_eos")
    chain, tree = (json.loads(run(capsys, *common, *ids([11, 12]), *more)[1]) for more in ([], ["--budget=12"]))
    assert chain["method"] == "dflash" and set(chain["tree_sizes"]) == {8} and chain["settings"]["width"] == 1
    assert tree["method"] == "jetspec" and set(tree["tree_sizes"]) == {12}
    got = json.loads(run(capsys, *common, *rows(tmp_path, {"prompt_ids": [11, 12], "budget": 12}))[1])
    assert got["method"] == "jetspec" and got["token_ids"] == tree["token_ids"] == chain["token_ids"]
    assert json.loads(run(capsys, *pair(), *ids([11]), "--max_new_tokens=1", "--json")[1])["method"] == "jetspec"


def test_ngram_needs_no_head(capsys):
    common = ("--target", PAIR / "target", *ids([5, 9, 5, 9, 5]), "--max_new_tokens=12", "--json")
    status, out, err = run(capsys, *common, "--method=ngram", "--compare", "--budget=6")
    got = json.loads(out)
    assert status == 0 and got["method"] == "ngram" and got["compare"]["equal"], err
    for option in ("--head=x", "--tree=best_first", "--width=3", "--sharpness=1"):
        status, _, err = run(capsys, *common, "--method=ngram", option)
        assert status == 2 and "contradicts --method ngram" in err
    assert run(capsys, *common, "--method=synthetic")[0] == 2  # its tokens say nothing: no command offers it


def test_ddtree_is_the_tree_that_no_width_cuts(capsys, tmp_path):
    folder = FIXTURES / "dense_bidirectional"
    trace = tmp_path / "t.npz"
    common = (*pair(folder), *ids([11, 12]), "--max_new_tokens=9", "--json", "--budget=12", "--ignore_eos")
    got = json.loads(run(capsys, *common, "--method=ddtree", "--trace", trace)[1])
    assert got["method"] == "ddtree" and got["settings"]["width"] == got["settings"]["rows"] - 1
    tokens, parents, depths = (np.load(trace)[f"round0_tree_{name}"] for name in ("tokens", "parents", "depths"))
    logits = np.load(trace)["round0_draft_logits"].astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    score = np.zeros(12)
    for i in range(1, 12):
        score[i] = score[parents[i]] + logp[depths[i] - 1, tokens[i]]
    for i in np.flatnonzero(depths < len(logp)):  # no child that was left out is more probable than one that was taken
        others = np.delete(logp[depths[i]], tokens[parents == i])
        assert score[i] + others.max() <= score.min() + 1e-5
    assert run(capsys, *pair(), *ids([5]), "--method=ddtree")[0] == 1


def test_a_round_is_drawn_as_text_and_as_a_picture(capsys, tmp_path):
    trained, picture = FIXTURES / "dense_trained", tmp_path / "t.svg"
    prompt = json.loads((trained / "expected.json").read_text())["cases"][0]["prompt"]
    common = (*pair(trained), *ids(prompt), "--max_new_tokens=24", "--budget=16", "--json")
    status, out, err = run(capsys, *common, "--show_tree", "--tree_svg", picture, "--tree_round=2")
    got, plain = json.loads(out), json.loads(run(capsys, *common)[1])
    drawn = [line for line in err.splitlines() if line.startswith(("●", "├", "└", "│", " "))]
    assert status == 0 and got["token_ids"] == plain["token_ids"] and len(drawn) == got["tree_sizes"][1] + 1
    assert sum("●" in line for line in drawn) == got["accept_lengths"][1] and sum("+ <" in line for line in drawn) == 1
    first = 1 + got["emitted"][0]
    kept = [line.split("<")[1].split(">")[0] for line in drawn if "●" in line or "+ <" in line]
    assert list(map(int, kept)) == got["token_ids"][first - 1 : first + got["emitted"][1]]
    assert all(0 <= float(p) <= 1 for line in drawn[1:] for p in line.split("  ")[-1].split(" / ") if p != "-")
    root = xml.etree.ElementTree.parse(picture).getroot()
    kinds = [node.tag.split("}")[1] for node in root]
    assert kinds.count("circle") == got["tree_sizes"][1] + 1 and kinds.count("path") == got["tree_sizes"][1]
    status, out, err = run(capsys, *common, "--show_tree", "--tree_round=99")
    assert status == 1 and "tree_round=99" in err and out == ""


def test_a_chain_of_a_thousand_is_drawn():
    deep = 1500
    done = trace.Recorded(
        np.arange(deep) % 3, np.arange(-1, deep - 1), np.arange(deep), np.arange(deep), 2, None, np.zeros((deep, 3))
    )
    assert len(draw.lines(done, 1, str)) == deep + 2 and draw.svg(done, 1, str).count("<circle") == deep + 1


def test_a_refused_command_leaves_nothing(capsys, tmp_path):
    names = [tmp_path / name for name in ("t.npz", "t.svg", "profile")]
    common = ("--trace", names[0], "--tree_svg", names[1], "--profile", names[2])
    assert run(capsys, *pair(), *ids([64]), *common)[0] == 1 and not any(name.exists() for name in names)
    names[0].write_bytes(b"mine")
    assert run(capsys, *pair(), *ids([64]), *common)[0] == 1 and names[0].read_bytes() == b"mine"
    status, _, err = run(capsys, *pair(), *ids([5]), "--profile", names[0] / "x")
    assert status == 1 and "no folder can be made there" in err


def test_damaged_weights_and_tokens_outside_the_model_name_no_flag_that_nobody_gave(capsys, monkeypatch):
    loaded = load.load_target

    def damaged(*args, **options):
        found = loaded(*args, **options)
        return dataclasses.replace(found, params=found.params | {"norm": found.params["norm"] * np.nan})

    monkeypatch.setattr(load, "load_target", damaged)
    status, _, err = run(capsys, *pair(), *ids([5]), "--json", "--budget=16")
    assert status == 1 and "not finite in float32" in err and "broken" in err and "--" not in err.splitlines()[-1]
    monkeypatch.setattr(load, "load_target", loaded)
    monkeypatch.setattr(prompts, "prompt_ids", lambda *_: [5, 70])
    status, _, err = run(capsys, *pair(), "--prompt", "x")
    assert status == 1 and "prompt: 70 is no token of the target" in err and "prompt_ids" not in err


def test_long_numbers_and_a_device_that_is_not_there(capsys, monkeypatch):
    status, _, err = run(capsys, "--prompt_ids", "9" * 5000)
    assert status == 2 and len(err) < 200 and "whole numbers" in err

    def nothing():
        raise RuntimeError("Unable to initialize backend 'cuda'\nmore")

    monkeypatch.setattr("jax.devices", nothing)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    status, _, err = run(capsys, *pair(), *ids([5]))
    assert status == 1 and "JAX_PLATFORMS=cuda: Unable to initialize" in err and err.count("\n") == 2


@pytest.mark.parametrize(
    "words",
    [
        ("--json",),
        pytest.param(("--json", "--batch=3", "--compare"), marks=pytest.mark.slow),
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("--batch=3", "--compare"), marks=pytest.mark.slow),
    ],
)
def test_a_row_that_breaks_is_said_and_the_others_are_decoded(capsys, monkeypatch, tmp_path, words):
    loaded = load.load_target

    def damaged(*args, **options):
        found = loaded(*args, **options)
        return dataclasses.replace(
            found, params=found.params | {"embedding": found.params["embedding"].at[7].set(np.nan)}
        )

    monkeypatch.setattr(load, "load_target", damaged)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt_ids": [1, i, 3]}) + "\n" for i in (2, 7, 2)))
    status, out, err = run(capsys, *pair(), "--prompt_file", rows, "--max_new_tokens", 3, "--budget=4", *words)
    assert status == 1 and out.count("\n") == 3
    said = [line for line in err.splitlines() if "not finite" in line]
    assert len(said) == 1 and f"decode.py: {rows}:2: the target's logits are not finite" in said[0]
    if "--json" in words:
        found = [json.loads(line) for line in out.splitlines()]
        assert [x["finish_reason"] for x in found] == ["length", "error", "length"]
        assert ["compare" in x for x in found] == ["--compare" in words, False, "--compare" in words]
