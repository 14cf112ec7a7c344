"""Where compiled programs are kept, and flags of XLA that are set only when asked for."""

import os
import pathlib
import subprocess
import sys

import jax
import jaxlib.version
import pytest

from jetspec_jax.config import ConfigError
from jetspec_jax.files import cache_folder, xla

ROOT = pathlib.Path(__file__).parent.parent
PAIR = ROOT / "tests" / "fixtures" / "peer_parity" / "dense_trained"
CACHE = "jax_compilation_cache_dir"


@pytest.fixture
def no_cache():
    before = getattr(jax.config, CACHE)
    jax.config.update(CACHE, None)
    yield
    jax.config.update(CACHE, before)


def test_programs_are_kept_unless_the_user_chose_a_folder(no_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path))
    cache_folder.keep_programs()
    assert getattr(jax.config, CACHE) == str(tmp_path / "xla")
    jax.config.update(CACHE, "mine")
    cache_folder.keep_programs()
    assert getattr(jax.config, CACHE) == "mine"


def test_a_cache_that_cannot_be_written_is_left_out(no_cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path / "file"))
    cache_folder.keep_programs()
    assert getattr(jax.config, CACHE) is None


def test_a_cache_whose_name_is_not_utf8_is_left_out(no_cache, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("JETSPEC_CACHE", os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    cache_folder.keep_programs()
    assert getattr(jax.config, CACHE) is None
    err = capsys.readouterr().err
    assert "no UTF-8 name" in err and err.count("\n") == 1
    assert cache_folder.path().name == "caf\udce9"


def test_flags_are_known_by_version_and_what_is_set_wins(monkeypatch):
    monkeypatch.setattr(xla, "TESTED", {jaxlib.version.__version__: ("--xla_a=1", "--xla_b=2")})
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=3")
    xla.apply_flags()
    assert os.environ["XLA_FLAGS"] == "--xla_a=1 --xla_b=2 --xla_b=3"  # of two, XLA takes the last
    monkeypatch.setattr(xla, "TESTED", {"0.0.1": ()})
    with pytest.raises(ConfigError, match=r"xla_flags=tested: none were tested with jaxlib .* only with 0.0.1"):
        xla.tested_flags()


def decode(*flags):
    command = [sys.executable, str(ROOT / "decode.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_decode_prints_them_or_says_that_there_are_none():
    done = decode("--xla_flags=print")
    if jaxlib.version.__version__ in xla.TESTED:
        assert done.stdout.split() == list(xla.tested_flags()) and done.returncode == 0
        pair = f"--target={PAIR / 'target'}", f"--head={PAIR / 'head'}", "--prompt_ids=1,2,3", "--max_new_tokens=4"
        plain, flagged = decode(*pair, "--json"), decode(*pair, "--json", "--xla_flags=tested")
        ids = lambda run: run.stdout.partition('"token_ids": ')[2].partition("]")[0]
        assert flagged.returncode == 0 and ids(plain) == ids(flagged) != ""
    else:
        assert done.returncode == 2 and "none were tested with jaxlib" in done.stderr and done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
