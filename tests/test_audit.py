"""The audit: equal outputs, ties, defects in float32 and in 16 bits, and the command."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jetspec_jax import audit
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.evals import acceptance
from jetspec_jax.files import load

PAIR = pathlib.Path(__file__).parent / "fixtures" / "peer_parity" / "dense_trained"
PROMPTS = [[1, 2, 3], [9], [4, 4, 8, 30, 2], [7, 1], [20, 21]]
TREE, SAMPLING = TreeConfig(6), SamplingConfig(20)


FAULTS = ("", "positions", "16 bits", "rounding", "prefill")


@dataclasses.dataclass(frozen=True)
class Faulty:
    """A target whose passes over trees (or over prompts, where it is tapped) go wrong as params["fault"] says."""

    inner: object

    @property
    def vocab_size(self):
        return self.inner.vocab_size

    @property
    def backend(self):
        return self.inner.backend

    def forward(self, params, tokens, positions, mask, cache=None, length=None, taps=()):
        tree = cache is not None and tokens.shape[1] > 1
        fault = lambda name, here=True: (params["fault"] == FAULTS.index(name)) & here
        positions = positions + fault("positions", tree)
        taps_of_inner = () if isinstance(self.inner, tiny.HashTarget) else taps
        out = self.inner.forward(self._own(params), tokens, positions, mask, cache, length, taps_of_inner)
        hidden, sixteen = out.hidden, out.hidden.dtype == jnp.bfloat16
        hidden = jnp.where(fault("16 bits", tree and sixteen), hidden[..., ::-1], hidden)
        hidden = jnp.where(fault("rounding", sixteen), hidden * 1.004, hidden)  # what float32 would not do
        nudged = hidden.at[..., 1].add(0.01 if sixteen else 1e-6)  # as another order of summation would
        once = fault("rounding", tree) | fault("prefill", bool(taps) and cache is None)
        return out._replace(hidden=jnp.where(once, nudged, hidden))

    def init_cache(self, params, batch, capacity):
        return self.inner.init_cache(self._own(params), batch, capacity)

    def embed(self, params, tokens):
        return self.inner.embed(self._own(params), tokens)

    def logits(self, params, hidden):
        return self.inner.logits(self._own(params), hidden).astype(jnp.float32)

    def _own(self, params):
        return {name: value for name, value in params.items() if name != "fault"}


def with_fault(loaded, fault: str, dtype, params=None) -> tiny.Loaded:
    cast = lambda leaf: leaf.astype(dtype) if leaf.dtype == jnp.float32 else leaf
    params = jax.tree.map(cast, params or loaded.params) | {"fault": jnp.int32(FAULTS.index(fault))}
    return dataclasses.replace(loaded, params=params, model=Faulty(loaded.model), dtype=str(jnp.dtype(dtype)))


def real(dtype=jnp.float32, fault: str = ""):
    head = tiny.head(True)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), head.params)
    return with_fault(tiny.target("dense"), fault, dtype), dataclasses.replace(head, params=params)


def stub(fault: str, dtype=jnp.float32):
    """Tokens 0 and 1 are equally good everywhere, and the best wherever the table's row number is even."""
    loaded = tiny.hash_target()
    best = loaded.params["table"].max(1) + jnp.where(jnp.arange(97) % 2, -1.0, 1.0)
    table = loaded.params["table"].at[:, :2].set(best[:, None])
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((4, tiny.VOCAB)), jnp.float32)
    head = tiny.LoadedHead(tiny.TableDraft(4, (0,)), {"logits": logits})
    return with_fault(loaded, fault, dtype, loaded.params | {"table": table}), head


def run(pair, sampling=SAMPLING, **options):
    return audit.audit(*pair, PROMPTS, TREE, sampling, **options)


@pytest.mark.parametrize("measure", [pytest.param(audit.audit, marks=pytest.mark.slow), acceptance.measure])
def test_prompts_as_a_tokenizer_returns_them(measure):
    """A mapping would be taken for a list of its keys, an iterator be used up; text is refused by name."""
    target, head, rest = tiny.target("dense"), tiny.head(True), (TreeConfig(4), SamplingConfig(3), 2)
    padded = {"input_ids": np.array([[1, 2, 3], [4, 0, 0]]), "attention_mask": np.array([[1, 1, 1], [1, 0, 0]])}
    for prompts, count in ((padded, 2), ([[1, 2, 3], [4]], 2), ([1, 2, 3], 1)):
        assert measure(target, head, prompts, *rest)["prompts"] == count
    for wrong in (["a"], {"a": [1]}, iter([[1]]), {(1,)}, []):
        with pytest.raises(ConfigError, match="prompts"):
            measure(target, head, wrong, *rest)


def test_equal_outputs():
    report = run(stub(""))
    assert (report["prompts"], report["equal"], report["ties"], report["defects"]) == (5, 5, 0, 0)
    assert report["tokens"] == report["tokens_compared"] == 100 and report["divergences"] == []
    assert report["settings"]["budget"] == 6 and report["settings"]["dtype"] == "float32"
    assert "5 of 5 outputs equal" in audit.text(report)


def test_a_tie_of_rounding_in_float32():
    report = run(stub("rounding"))
    assert report["ties"] == len(report["divergences"]) >= 2 and report["defects"] == 0
    assert report["equal"] + report["ties"] == 5
    for d in report["divergences"]:
        assert (d["plain_token"], d["token"], d["gap"], d["margin"]) == (0, 1, 0.0, 0.0)
        assert d["difference"] == pytest.approx(1e-6, rel=0.2) and d["std"] > 1 and d["f32"] is None
        assert d["position"] > 0 and "below" in d["reason"]
    assert report["tokens_compared"] == 20 * report["equal"] + sum(d["position"] + 1 for d in report["divergences"])


def judged(dtype, gap: float, difference: float, repeats=True) -> audit.Divergence:
    """The verdict where tokens 0 and 1 are the best: 0 of the plain run by `gap`, 1 of the other."""
    plain = np.linspace(-2, 2, tiny.VOCAB).astype(np.float32)
    plain[0], plain[1] = 5, 5 - gap
    fast = plain.copy()
    fast[0] -= difference
    this = audit.Divergence(0, 1, 0, 1)
    loaded = dataclasses.replace(tiny.hash_target(), dtype=dtype)
    audit._judge(this, plain, fast, (loaded, [3], [4]), SAMPLING, repeats)
    return this


def test_the_borders_of_a_tie():
    """As the module's docstring says them: 1e-4 of the std in float32, twice the runs' difference in 16 bits."""
    std = judged("float32", 1e-4, 1.0).std
    assert std == pytest.approx(1.65, rel=0.1)
    assert [judged("float32", share * std, 1.0).verdict for share in (9e-5, 1.1e-4)] == ["tie", "defect"]
    # The other token must win in the other run, so the difference is larger than the gap: another logit has it.
    assert judged("bfloat16", 0.9, 1.0).verdict == "tie" and judged("float32", 1e-5, 1.0, False).verdict == "defect"


def test_the_borders_of_16_bits(monkeypatch):
    """Float32 agrees; the speculative logits may be eight times as far from it, and no farther."""
    monkeypatch.setattr(audit, "audit", lambda *a: {"divergences": []})
    monkeypatch.setattr(audit.baseline, "next_logits", lambda target, rows: jnp.zeros((len(rows), 4)))
    verdicts = []
    for far in (7.9, 8.1):
        d = audit.Divergence(0, 1, 0, 1, verdict="tie")
        kept = {0: ([1, 2], np.full(4, 1.0), np.full(4, far))}
        audit._recheck(*stub("", jnp.bfloat16), PROMPTS, TREE, SAMPLING, 4, [d], kept)
        verdicts.append((d.verdict, d.f32["plain_error"], d.f32["speculative_error"]))
    assert verdicts == [("tie", 1.0, 7.9), ("defect", 1.0, 8.1)]


def test_a_difference_in_the_first_token():
    """Its logits are those of prefill."""
    report = run(stub("prefill"))
    first = [d for d in report["divergences"] if d["position"] == 0]
    assert first and report["defects"] == 0
    assert all((d["plain_token"], d["token"], d["gap"]) == (0, 1, 0.0) and d["difference"] > 0 for d in first)


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.7, marks=pytest.mark.slow)])
def test_a_fault_is_a_defect_in_float32(temperature):
    report = run(stub("positions"), SamplingConfig(20, temperature, 3))
    assert report["defects"] >= 4
    for d in report["divergences"]:
        assert d["gap"] >= d["margin"] and d["difference"] > 0.5
        assert (d["verdict"] == "tie") == (d["gap"] < 1e-4 * d["std"])
    assert "DEFECT" in audit.text(report)


def test_rounding_in_16_bits_is_confirmed_in_float32():
    report = run(stub("rounding", jnp.bfloat16))
    assert report["defects"] == 0 and report["ties"] >= 2
    for d in report["divergences"]:
        assert d["gap"] <= 2 * d["difference"] and d["f32"]["verdict"] in ("equal", "tie")
        assert "float32 agrees" in d["reason"]


@pytest.mark.parametrize("fault, words", [("positions", "in float32 the outputs part too"), ("16 bits", "as far from")])
def test_faults_in_16_bits(fault, words):
    """A fault makes the runs differ so much that the gap alone would pass; float32 tells, also of one that it lacks."""
    report = run(stub(fault, jnp.bfloat16))
    assert report["defects"] >= 4 and any(words in d["reason"] for d in report["divergences"])
    lax = run(stub(fault, jnp.bfloat16), recheck=False)
    assert lax["defects"] < report["defects"] and all(d["f32"] is None for d in lax["divergences"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_real_models(dtype):
    """A random target and head: no defect as they are, defects with a fault."""
    report = run(real(dtype), SamplingConfig(60), batch=2)
    assert report["defects"] == 0 and (report["equal"] == 5 if dtype == jnp.float32 else report["ties"] > 0)
    assert run(real(dtype, "positions"))["defects"] > 0


def test_an_output_that_ends_early_and_a_run_that_does_not_repeat():
    ended = audit.Divergence(0, 3, 5, None)
    behind = stub("")[0], [1, 2], [3]
    audit._judge(ended, np.zeros(4), np.zeros(4), behind, SAMPLING, True)
    assert ended.verdict == "defect" and "ended" in ended.reason
    plain, fast = np.array([1.0, 0.99999, 0]), np.array([1.0, 1.00001, 0])
    for repeats, token in ((True, 1), (False, 1), (True, 2)):
        d = audit.Divergence(0, 3, 0, token)
        audit._judge(d, plain, fast, behind, SAMPLING, repeats)
        assert (d.verdict == "tie") == (repeats and token == 1)
        assert d.verdict == "tie" or "repeat" in d.reason


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("share, verdict", [(0.8e-4, "tie"), (1.25e-4, "defect"), (0.5e-3, "defect")])
def test_a_tie_in_float32_is_a_gap_below_a_ten_thousandth_of_the_std(share, verdict, scale):
    """By hand: of (1, 1 - gap, -1, -1) the standard deviation is 1 within the gap."""
    gap = share * scale
    plain, fast = (np.array(x, np.float64) * 1.0 for x in ([scale, scale - gap, -scale, -scale],) * 2)
    fast[1] += 2 * gap  # the other token wins there
    d = audit.Divergence(0, 3, 0, 1)
    audit._judge(d, plain, fast, (tiny.target("dense"), [1, 2], [3]), SAMPLING, True)
    assert d.std == pytest.approx(scale, rel=1e-3) and d.gap == pytest.approx(gap, rel=0.05)
    assert d.verdict == verdict


class TestCommand:
    def args(self, tmp_path, *more, lines=('{"prompt_ids": [11, 12, 17]}', '{"prompt_ids": [5]}')):
        file = tmp_path / "p.jsonl"
        file.write_text("\n".join(lines))
        options = ["--max-new-tokens", "24", "--budget=8"]
        return ["--target", str(PAIR / "target"), "--head", str(PAIR / "head"), "--prompts", str(file), *options, *more]

    @pytest.mark.slow  # the next one reads such a report too
    def test_json(self, tmp_path, capsys):
        assert audit.main(self.args(tmp_path, "--json")) == 0
        out, _ = capsys.readouterr()
        report = json.loads(out)
        assert report["equal"] == 2 and report["tokens"] == report["tokens_compared"] > 20

    def test_options_reach_the_decoding_and_what_is_left_out_is_said(self, tmp_path, capsys):
        options = ["--temperature=1", "--seed=3", "--top_p=0.9", "--logit_bias=5:2", "--stop_token_ids=7"]
        lines = '{"prompt_ids": [11, 12, 17]}', '{"prompt_ids": [1, 2, 3, 4, 5]}', '{"prompt_ids": [5]}'
        args = self.args(tmp_path, *options, "--max_prompt_tokens=4", lines=lines)
        assert audit.main([*args, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        got = report["settings"]
        assert (got["temperature"], got["top_p"], got["logit_bias"], got["stop_token_ids"]) == (1, 0.9, [[5, 2.0]], [7])
        assert report["equal"] == 2 and report["left_out"] == 1
        assert audit.main(args) == 0 and "1 prompts left out" in capsys.readouterr().out

    def test_a_defect_is_status_1(self, tmp_path, capsys, monkeypatch):
        made = audit.audit
        monkeypatch.setattr(audit, "audit", lambda *a: made(*a) | {"defects": 1})
        assert audit.main(self.args(tmp_path)) == 1
        assert "at a defect" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "more, words",
        [
            (["--budgt", "3"], ("--budgt", "--budget")), (["--budget", "0"], ("--budget", "0")),
            (["--batch", "x"], ("--batch", "x")), (["--dtype", "int8"], ("--dtype", "int8")),
            (["--temperature", "-1"], ("--temperature=-1",)), (["--logit_bias", "x"], ("--logit_bias='x'",)),
            (["--stop_token_ids", "1;2"], ("--stop_token_ids",)), (["--top_p", "0"], ("--top_p=0",)),
            (["--thinking", "maybe"], ("--thinking", "maybe")),
        ],
    )  # fmt: skip
    def test_wrong_options(self, tmp_path, capsys, more, words):
        status = audit.main(self.args(tmp_path, *more))
        out, err = capsys.readouterr()
        assert status == 2 and out == "" and err.count("\n") == 1 and all(word in err for word in words)

    @pytest.mark.parametrize(
        "lines, words",
        [
            (["{"], "not JSON"), (['{"prompt": 3}'], ":1: prompt is 3"), (["[1]"], "JSON object"),
            (['{"prompt_ids": [1]}', '{"prompt": "a", "messages": []}'], ":2: give one of"),
            (['{"messages": "x"}'], "messages"), (['{"messages": []}'], "messages"),
            (['{"prompt": "hi"}'], "no tokenizer"), (['{"prompt_ids": []}'], "prompt_ids"),
            (['{"prompt_ids": [1], "top_p": 0.3}'], ":1: top_p: options of a line are for decode.py"),
            (['{"prompt_ids": [1], "nonsense": 1}'], "unknown key 'nonsense'; known are"),
            (['{"prompt_ids": ["1"]}'], "ids"), (['{"prompt_ids": [64]}'], "0..63"), ([""], "no prompt"),
            (['{"prompt_ids": [' + "1," * 2000 + "1]}"], "--max_prompt_tokens"),
        ],
    )  # fmt: skip
    def test_wrong_files(self, tmp_path, capsys, lines, words):
        assert audit.main(self.args(tmp_path, lines=lines)) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and words in err

    def test_missing_files_and_thinking(self, tmp_path, capsys):
        for args in (self.args(tmp_path, "--prompts", "none.jsonl"), self.args(tmp_path, "--thinking", "on")):
            assert audit.main(args) == 1
            assert capsys.readouterr().err.count("\n") == 1
        assert audit.main(self.args(tmp_path)[:2] + self.args(tmp_path)[4:]) == 2
        assert "--target without --head" in capsys.readouterr().err

    def test_broken_logits(self, tmp_path, capsys, monkeypatch):
        whole = load.load_target

        def broken(*args):
            target = whole(*args)
            return dataclasses.replace(target, params=target.params | {"norm": target.params["norm"] * jnp.nan})

        monkeypatch.setattr(load, "load_target", broken)
        assert audit.main(self.args(tmp_path)) == 1
        assert "not finite" in capsys.readouterr().err
