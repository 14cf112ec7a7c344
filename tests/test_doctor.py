"""The doctor: a pair that fits, broken ones with the cause by name, and the command."""

import dataclasses
import json
import pathlib
import shutil

import bpe
import numpy as np
import pytest

from jetspec_jax import doctor, speculate
from jetspec_jax.config import SamplingConfig
from jetspec_jax.evals import probe
from jetspec_jax.files import load, tokenizer
from jetspec_jax.layers.rope_scaling import RopeScaling

FIXTURES = pathlib.Path(__file__).parent / "fixtures" / "peer_parity"
PAIR = FIXTURES / "dense_trained"  # a head that was trained, on the texts behind these prompts
PROMPTS = [case["prompt"] for case in json.loads((PAIR / "expected.json").read_text())["cases"]]


@pytest.fixture(scope="module")
def target():
    return load.load_target(PAIR / "target")


@pytest.fixture(scope="module")
def head(target):
    return load.load_head(PAIR / "head", target)


@pytest.fixture(scope="module")
def texts(target, head):
    answers = speculate.generate(target, None, PROMPTS, None, SamplingConfig(48))
    return probe.texts(target, PROMPTS, [r.token_ids for r in answers], head.draft.depth)


@pytest.fixture
def prompt_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_ids": p}) + "\n" for p in PROMPTS))
    return str(file)


def broken(folder: pathlib.Path, meta=None, block=None, **changes) -> str:
    """The trained head under another config.json."""
    shutil.copytree(PAIR / "head", folder)
    raw = json.loads((folder / "config.json").read_text()) | changes
    raw["dflash_config"] |= block or {}
    (folder / "config.json").write_text(json.dumps(raw))
    if meta is not None:
        (folder / "jetspec.json").write_text(json.dumps(meta))
    return str(folder)


def by_check(findings) -> dict[str, doctor.Finding]:
    return {f.check: f for f in findings}


class TestCauses:
    """What the probe names, on answers that are decoded once."""

    @pytest.mark.parametrize(
        "change, key, right",
        [
            ({"tap_layers": (5, 3, 1)}, "target_layer_ids", [1, 3, 5]),
            ({"tap_layers": (1, 5, 3)}, "target_layer_ids", [1, 3, 5]),
            ({"tap_layers": (2, 4, 6)}, "target_layer_ids", [1, 3, 5]),
            ({"tap_layers": (0, 2, 4)}, "target_layer_ids", [1, 3, 5]),
            ({"mask_token_id": 62}, "mask_token_id", 63),
            pytest.param({"mask_token_id": 40}, "mask_token_id", 63, marks=pytest.mark.slow),
            ({"causal": False}, "causal_head", True),
            pytest.param({"rope_theta": 1e3}, "rope_theta", 1e6, marks=pytest.mark.slow),
            pytest.param(
                {"rope_scaling": RopeScaling("linear", 8.0, 4096)}, "rope_scaling", None, marks=pytest.mark.slow
            ),
        ],
    )
    def test_it_is_named(self, target, head, texts, change, key, right):
        wrong = dataclasses.replace(head, config=dataclasses.replace(head.config, **change))
        figures = {}
        (finding,) = doctor._others(target, wrong, texts, figures)
        assert (finding.check, finding.status) == (key, "wrong") and "likely cause" in finding.detail
        assert str(right) in finding.detail and figures["better"]["other"] == right
        assert figures["better"]["chain_run"] > 1.1 * figures["chain_run"]

    def test_nothing_is_better_than_the_right_one(self, target, head, texts):
        figures = {}
        assert doctor._others(target, head, texts, figures) == []
        assert figures["chain_run"] > 3

    def test_a_shifted_head(self, target, head, texts, monkeypatch):
        """Stands for a head whose slot k predicts one position later: the two readings change places."""
        runs = probe.runs
        monkeypatch.setattr(probe, "runs", lambda *args: runs(*args)[::-1])
        (finding,) = doctor._others(target, head, texts, {})
        assert finding.check == "draft shift" and "one position later" in finding.detail

    def test_answers_too_short_for_a_block(self, target, head):
        depth = head.draft.depth
        assert probe.texts(target, [[1], [2], [5]], [[3, 4], [], [6] * (depth + 1)], depth) is None

    def test_every_anchor_has_a_whole_block_after_it(self, head, texts):
        """And lies at the first answer token's anchor or later."""
        rows = [len(p) + 48 for p in PROMPTS[: probe.ROWS]]
        assert texts.anchors.max(1).tolist() == [row - head.draft.depth - 1 for row in rows]
        assert texts.anchors.min(1).tolist() == [max(len(p) - 1, 1) for p in PROMPTS[: probe.ROWS]]

    def test_better_is_by_a_tenth_and_three_standard_errors(self):
        own = np.full(100, 2.0)
        swing = np.tile([1.0, -1.0], 50)
        assert doctor._better(own + 0.3, own) and not doctor._better(own + 0.19, own)
        assert doctor._better(own + 0.25 + 0.8 * swing, own) and not doctor._better(own + 0.25 + 0.9 * swing, own)

    def test_few_rounds_are_no_verdict(self, target, head):
        findings, figures = doctor.measure(target, head, PROMPTS[:1], 3)
        assert figures["rounds"] < 8 and [f.status for f in findings] == ["note"]
        assert "too short to tell" in findings[0].detail


class TestCompare:
    def look(self, target, head, metadata=None, **changes):
        return by_check(doctor.compare(target, dataclasses.replace(head.config, **changes), metadata or {}))

    def test_a_pair_that_fits(self, target, head):
        found = self.look(target, head, {"target_fingerprint": target.fingerprint, "training_length": 512})
        assert {f.status for f in found.values()} == {"ok"}
        assert "rows of 512" in found["trained length"].detail and target.fingerprint in found["fingerprint"].detail

    def test_sizes(self, target, head):
        found = doctor.compare(target, dataclasses.replace(head.config, hidden_size=32, vocab_size=96), {})
        wrong = [f.detail for f in found if f.status == "wrong"]
        assert len(wrong) == 2 and "hidden_size is 32" in wrong[0] and "vocab_size is 96" in wrong[1]

    @pytest.mark.parametrize(
        "check, words, metadata, changes",
        [
            ("taps", "ascending", {}, {"tap_layers": (5, 3, 1)}), ("taps", "usual", {}, {"tap_layers": (2, 4, 6)}),
            ("mask id", "end token", {}, {"mask_token_id": 62}), ("rope", "theta 1000", {}, {"rope_theta": 1e3}),
            ("rope", "yarn", {}, {"rope_scaling": RopeScaling("yarn", 4.0, 1024)}),
            ("fingerprint", "0123", {"target_fingerprint": "0123"}, {}), ("thinking", "switch", {"thinking": True}, {}),
            ("jetspec.json", "eagle3", {"family": "eagle3"}, {}),
        ],
    )  # fmt: skip
    def test_what_may_cost_acceptance_is_noted(self, target, head, check, words, metadata, changes):
        found = self.look(target, head, metadata, **changes)[check]
        assert found.status == "note" and words in found.detail

    def test_with_a_tokenizer(self, target, head, tmp_path):
        tok = tokenizer.from_folder(bpe.make(tmp_path / "t"))
        loaded = dataclasses.replace(target, _tokenizer=lambda: tok)
        letter = tok.encode("!")[0]
        found = self.look(loaded, head, {"thinking": False}, mask_token_id=letter)
        assert found["mask id"].status == "note" and "'!'" in found["mask id"].detail
        assert "trained without thinking" in found["thinking"].detail
        assert self.look(loaded, head, mask_token_id=1)["mask id"].status == "ok"  # a special token


class TestCommand:
    def run(self, capsys, *args) -> tuple[int, str, str]:
        return doctor.main([str(a) for a in args]), *capsys.readouterr()

    def test_a_pair_that_fits(self, capsys, prompt_file):
        options = ("--prompts", prompt_file, "--max-new-tokens", 48)
        status, out, _ = self.run(capsys, PAIR / "target", PAIR / "head", *options, "--json")
        report = json.loads(out)
        assert status == 0 and report["belong"] and report["figures"]["acceptance_length"] > 3
        assert "belong together" in doctor.text(report)

    @pytest.mark.slow
    def test_refused_drafts_of_made_up_ids_are_no_verdict(self, capsys):
        status, out, _ = self.run(capsys, PAIR / "target", PAIR / "head", "--max-new-tokens", 24, "--json")
        found = {f["check"]: f for f in json.loads(out)["findings"]}["acceptance"]
        assert status == 0 and found["status"] == "note" and "made-up ids" in found["detail"]

    def test_sizes_are_named_without_decoding(self, capsys, tmp_path):
        head = broken(tmp_path / "h", vocab_size=96, num_target_layers=9)
        status, out, _ = self.run(capsys, PAIR / "target", head)
        assert status == 1 and "vocab_size is 96" in out and "num_target_layers is 9" in out
        assert "do not belong together" in out and "acceptance" not in out

    def test_heads_that_cannot_be_read(self, capsys, tmp_path):
        status, out, _ = self.run(capsys, PAIR / "target", broken(tmp_path / "a", block={"causal": False}))
        assert status == 1 and "contradicts" in out
        status, out, _ = self.run(capsys, PAIR / "target", broken(tmp_path / "b", block={"target_layer_ids": [1, 3]}))
        assert status == 1 and "fc.weight" in out

    def test_one_line_for_other_mistakes(self, capsys, tmp_path):
        cases = [
            ((PAIR / "none", PAIR / "head"), 1, "none"), ((PAIR / "target", PAIR / "none"), 1, "none"),
            ((PAIR / "target",), 2, "HEAD"), ((PAIR / "target", PAIR / "head", "--promts", "x"), 2, "--prompts"),
            ((PAIR / "target", PAIR / "head", "--prompts", tmp_path / "no.jsonl"), 1, "no.jsonl"),
        ]  # fmt: skip
        for args, wanted, words in cases:
            status, out, err = self.run(capsys, *args)
            assert status == wanted and out == "" and err.count("\n") == 1 and words in err

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "changes, words",
        [
            ({"block": {"target_layer_ids": [5, 3, 1]}}, "target_layer_ids"), ({"rope_theta": 1e3}, "rope_theta"),
            ({"block": {"mask_token_id": 62}}, "mask_token_id"), ({"block": {"causal_head": False}}, "causal_head"),
        ],
    )  # fmt: skip
    def test_broken_heads(self, capsys, tmp_path, prompt_file, changes, words):
        head = broken(tmp_path / "h", **changes)
        status, out, _ = self.run(capsys, PAIR / "target", head, "--prompts", prompt_file, "--max_new_tokens=48")
        assert status == 1 and f"wrong  {words}" in out and "likely cause" in out

    @pytest.mark.parametrize(
        "meta, words",
        [
            pytest.param(None, "another target of these sizes", marks=pytest.mark.slow),
            ({"target_fingerprint": "0"}, "fingerprints differ"),
        ],
    )
    def test_another_target_of_the_same_sizes(self, capsys, tmp_path, prompt_file, meta, words):
        head = broken(tmp_path / "h", meta)
        other = FIXTURES / "dense_causal" / "target"
        status, out, _ = self.run(capsys, other, head, "--prompts", prompt_file, "--max_new_tokens=48")
        assert status == 1 and "wrong  acceptance" in out and words in out
