"""The server as a command: its options, and how it ends."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from jetspec_jax.serve import memory, server

ROOT = pathlib.Path(__file__).parent.parent
PAIR = ROOT / "tests" / "fixtures" / "peer_parity" / "dense_causal"
WORDS = [
    *("--target", str(PAIR / "target"), "--head", str(PAIR / "head"), "--port", "0", "--batch", "2"),
    *("--context", "256"),
]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--batch", "6"], 2, "--batch=6: give a power of two"),
        (["--head", "x"], 2, "--head without --target: name both"),
        (["--target", "x"], 2, "--target without --head: name both"),
        (["--port", "70000"], 2, "--port=70000: give a whole number in 0..65535"),
        (["--method", "ngram", "--head", "x", "--target", "y"], 2, "--head contradicts --method ngram"),
        (["--contxt", "5"], 2, "did you mean --context?"),
        (["--host", "203.0.113.1", "--port", "0"], 1, "203.0.113.1 cannot be listened at"),
    ],
)
def test_mistakes_are_one_line(words, status, said, capsys):
    assert server.main(words) == status
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and err.startswith("serve: ")


def test_a_port_that_is_taken_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert server.main(["--port", str(port)]) == 1
    assert f"port={port}: 127.0.0.1 cannot be listened at" in capsys.readouterr().err


def test_pages_are_kept_where_the_library_can():
    """In a process of its own, for it cannot be taken back."""
    code = "from jetspec_jax.serve import memory; print(memory.keep_pages())"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert got.stdout.strip() in ("True", "False") and (got.stdout.strip() == "True" or sys.platform != "linux")
    assert dict(memory.KEEP) == {-8: 1, -4: 0, -1: 2**31 - 1}  # by the numbers of malloc.h


@contextlib.contextmanager
def started(*more, budget="4"):
    """Yields a server's process and its address."""
    command = [sys.executable, "-m", "jetspec_jax.serve", *WORDS, "--budget", budget, *more]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}
    )
    try:
        url = re.search(r"http://\S+(?=,)", process.stderr.readline()).group()
        yield process, url
    finally:
        process.kill()
        process.wait()


def ready(url: str) -> None:
    end = time.monotonic() + 300
    while httpx.get(url + "/health/ready").status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.slow
def test_sigterm_drains_and_exits_with_0():
    body = {"prompt": [11, 12], "max_tokens": 200, "ignore_eos": True, "seed": 1, "stream": True}
    with started() as (process, url):
        assert httpx.get(url + "/health").status_code == 200
        early = httpx.post(url + "/v1/completions", json=body)
        assert early.status_code == 503 and "being loaded" in early.json()["error"]["message"]
        ready(url)
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(10) == 0
        assert re.search(r"200 2 prompt tokens, 200 new", process.stderr.read())


def asked(url: str, number: int, **more) -> tuple[int, str]:
    """Status and text of an answer; every other one is a stream, which has to end as streams do."""
    body = {"prompt": [11, 12 + number % 5], "max_tokens": 60, "ignore_eos": True, "seed": number}
    stream = number % 2 == 0
    try:
        got = httpx.post(url + "/v1/completions", json=body | {"stream": stream} | more, timeout=120)
    except httpx.ConnectError:
        return 0, ""  # it has ended
    if got.status_code != 200 or not stream:
        return got.status_code, got.json()["choices"][0]["text"] if got.status_code == 200 else ""
    events = [line[6:] for line in got.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]" and "error" not in json.loads(events[-2])
    return 200, "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


@pytest.mark.slow
def test_sigterm_under_load_loses_no_accepted_answer():
    """Callers who ask again and again: whatever has been taken is answered, and the same as before."""
    with started("--queue", "32") as (process, url), concurrent.futures.ThreadPoolExecutor(12) as pool:
        ready(url)
        wanted = {number: asked(url, number)[1] for number in range(12)}

        def ask(number: int) -> list[tuple[int, str]]:
            found = []
            while not found or found[-1][0] == 200:
                found.append(asked(url, number))
            return found

        asking = [pool.submit(ask, number) for number in range(12)]
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        for number, one in enumerate(asking):
            *whole, (status, _) = one.result()
            assert status in (0, 503) and {text for _, text in whole} <= {wanted[number]}
        assert process.wait(20) == 0
        log = process.stderr.read()
        assert " 499 " not in log and " 500 " not in log


@pytest.mark.slow
def test_a_thousand_requests_and_memory_stays_flat():
    """Whole answers, streams, and callers who leave, over trees of every size."""
    with (
        started("--nolog", budget="auto") as (process, url),
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        ready(url)
        pages = lambda: int(pathlib.Path(f"/proc/{process.pid}/statm").read_text().split()[1])

        def ask(number: int) -> int:
            if number % 5 == 4:
                with contextlib.suppress(httpx.TimeoutException):
                    httpx.post(url + "/v1/completions", json={"prompt": [number % 40 + 3] * 9, "max_tokens": 200,
                                                              "ignore_eos": True}, timeout=0.05)  # fmt: skip
                return 200
            return asked(url, number, max_tokens=20, prompt=[3 + number % 40] * (1 + number % 50))[0]

        held = []
        for turn in range(10):
            assert set(pool.map(ask, range(100 * turn, 100 * turn + 100))) == {200}
            held.append(pages())
        metrics = httpx.get(url + "/metrics").text
        assert "jetspec_compiles_since_ready 0.0" in metrics
        assert held[-1] < 1.1 * held[2], held


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.parametrize("late", [False, True])
def test_signals_end_it_within_two_seconds(number, status, late):
    with started() as (process, url):
        if late:
            ready(url)
        else:
            time.sleep(6)  # somewhere in compilation
        begin = time.monotonic()
        process.send_signal(number)
        assert process.wait(10) == status and time.monotonic() - begin < 2.5


@pytest.mark.slow
def test_a_pair_that_cannot_be_loaded_ends_it():
    command = [sys.executable, "-m", "jetspec_jax.serve", "--target", "nowhere.gguf", "--head", "x", "--port", "0"]
    got = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}, timeout=60
    )
    assert got.returncode == 1 and got.stderr.splitlines()[-1].startswith("serve: nowhere.gguf")
