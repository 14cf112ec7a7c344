"""The HTTP server: answers are the offline answers, through OpenAI's own client, whatever else comes."""

import asyncio
import concurrent.futures
import json
import shutil
import socket
import time

import httpx
import openai
import pytest
import served
from served import HEAD, TARGET, slots

from jetspec_jax import speculate
from jetspec_jax.engine.slots import Slots
from jetspec_jax.evals import serve_bench
from jetspec_jax.options import SamplingConfig, TreeConfig
from jetspec_jax.serve.scheduler import Scheduler
from jetspec_jax.serve.service import Limits, Service

SAY = [{"role": "user", "content": "hello there"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server():
    with served.running(Limits(waiting=64, body=4096)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def offline(ids, **options) -> speculate.Result:
    """What plain decoding gives."""
    return speculate.generate(TARGET, None, ids, None, SamplingConfig(**options))


def messages(text: str) -> list:
    return [{"role": "user", "content": text}]


def post(server, path: str, body, **headers) -> httpx.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=data, headers=headers, timeout=30)


def soon(there, seconds: float = 5.0) -> bool:
    """Waits until something is there; returns whether that came. An answer is sent before its line is logged."""
    end = time.monotonic() + seconds
    while not there() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(there())


def test_a_chat_is_the_offline_answer(client):
    wanted = offline(TARGET.encode_messages(SAY), max_new_tokens=30)
    got = client.chat.completions.create(model="tiny", messages=SAY, max_tokens=30, temperature=0)
    (choice,) = got.choices
    assert choice.message.content == wanted.text and choice.message.role == "assistant"
    assert choice.finish_reason == wanted.finish_reason
    assert got.usage.completion_tokens == wanted.new_tokens and got.usage.prompt_tokens == wanted.prompt_tokens
    assert got.usage.total_tokens == wanted.new_tokens + wanted.prompt_tokens
    assert got.id.startswith("chatcmpl-") and got.object == "chat.completion" and got.model == "tiny"


def test_a_stream_joins_to_the_offline_answer_and_ends_with_its_usage(client):
    options = {"temperature": 1.0, "seed": 5, "max_new_tokens": 40}
    wanted = offline(TARGET.encode_messages(SAY), **options)
    chunks = list(client.chat.completions.create(
        model="tiny", messages=SAY, max_tokens=40, seed=5, stream=True, stream_options={"include_usage": True},
        extra_body={"return_tree": True},
    ))  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert text == wanted.text and ends[-1] == wanted.finish_reason and not any(ends[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == wanted.new_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1]) and {chunk.seed for chunk in chunks} == {5}
    trees = [chunk.tree for chunk in chunks if getattr(chunk, "tree", None)]
    assert trees and all(len(t["tokens"]) == len(t["parents"]) and t["accepted"][0] == 0 for t in trees)


def test_what_speculation_did_adds_up(client):
    """As aiperf checks it, and as decoding with the head says."""
    got = client.completions.create(model="tiny", prompt=[3, 4, 5], max_tokens=33, temperature=0)
    found = got.metrics["speculative_decoding"]
    histogram, steps = found["acceptance_histogram"], found["num_spec_steps"]
    assert sum(histogram) == steps and len(histogram) == served.DEPTH + 1
    assert (
        sum(i * n for i, n in enumerate(histogram)) == found["num_accepted_draft_tokens"] <= found["num_draft_tokens"]
    )
    drafted = speculate.generate(TARGET, HEAD, [3, 4, 5], TreeConfig(served.NODES), SamplingConfig(33))
    assert steps == drafted.rounds and found["num_draft_tokens"] == sum(drafted.tree_sizes) - drafted.rounds
    assert found["mean_acceptance_length"] == pytest.approx(drafted.acceptance_length)
    assert found["num_spec_tokens"] == served.DEPTH
    rates = got.metrics["tokens_per_second"]
    assert rates["plain"] is None and rates["speculative"] == pytest.approx(
        32 / got.metrics["seconds"]["decode"], rel=0.01
    )


def test_choices_have_the_next_seeds_and_prompts_their_order(client):
    got = client.completions.create(model="tiny", prompt=[[7, 8], [9, 10, 11]], n=2, seed=20, max_tokens=12)
    wanted = [
        offline(ids, temperature=1.0, seed=seed, max_new_tokens=12).text
        for ids in ([7, 8], [9, 10, 11])
        for seed in (20, 21)
    ]
    assert [choice.text for choice in got.choices] == wanted and [c.index for c in got.choices] == [0, 1, 2, 3]
    assert got.usage.prompt_tokens == 5 and got.seed == 20


def test_an_absent_seed_is_drawn_and_returned(client):
    ask = lambda **more: client.completions.create(model="tiny", prompt=[7, 8], max_tokens=16, **more)
    first, second = ask(), ask()
    assert first.seed != second.seed and 0 <= first.seed < 2**32
    assert ask(seed=first.seed).choices[0].text == first.choices[0].text


def test_log_probabilities_are_the_targets_own(client):
    wanted = offline([7, 8, 9], temperature=1.0, seed=2, max_new_tokens=9, ignore_eos=True, logprobs=True)
    ask = {"model": "tiny", "prompt": [7, 8, 9], "max_tokens": 9, "seed": 2, "extra_body": {"ignore_eos": True}}
    got = client.completions.create(**ask, logprobs=3).choices[0].logprobs
    assert got.token_logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    assert "".join(got.tokens) == wanted.text and got.text_offset == list(range(9))
    assert all(len(top) == 3 for top in got.top_logprobs)
    for token, value, top in zip(got.tokens, got.token_logprobs, got.top_logprobs, strict=True):
        assert top.get(token, value) == pytest.approx(value, abs=1e-5) and value <= max(top.values()) + 1e-5
    chunks = client.completions.create(**ask, logprobs=3, stream=True)
    rows = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    assert [v for row in rows for v in row.token_logprobs] == pytest.approx(got.token_logprobs, abs=1e-6)
    chat = client.chat.completions.create(model="tiny", messages=SAY, max_tokens=5, logprobs=True, top_logprobs=2)
    for entry in chat.choices[0].logprobs.content:
        assert bytes(entry.bytes).decode() == entry.token and len(entry.top_logprobs) == 2


def test_every_option_acts_as_offline(client):
    ids = TARGET.encode_messages(SAY)
    ours = {"top_k": 9, "min_p": 0.02, "repetition_penalty": 1.2, "min_tokens": 4, "budget": 3, "bad_words": ["a"]}
    got = client.chat.completions.create(
        model="tiny", messages=SAY, max_completion_tokens=32, temperature=0.8, top_p=0.9, presence_penalty=0.3,
        frequency_penalty=0.2, logit_bias={"7": 2.0}, stop=["q", "zz"], seed=11, extra_body=ours,
    )  # fmt: skip
    wanted = offline(
        ids, max_new_tokens=32, temperature=0.8, top_p=0.9, presence_penalty=0.3, frequency_penalty=0.2,
        logit_bias={7: 2.0}, stop=["q", "zz"], seed=11, top_k=9, min_p=0.02, repetition_penalty=1.2, min_new_tokens=4,
        bad_words=["a"],
    )  # fmt: skip
    assert got.choices[0].message.content == wanted.text and got.usage.completion_tokens == wanted.new_tokens
    assert got.choices[0].stop_reason == wanted.stopped_by


def test_many_at_once_have_their_own_answers(server, client):
    """Streams and whole answers, more than there are slots."""
    ask = lambda i: client.completions.create(model="tiny", prompt=[5 + i, 6], max_tokens=20 + i, seed=i, stream=False)

    def streamed(i):
        chunks = client.completions.create(model="tiny", prompt=[5 + i, 6], max_tokens=20 + i, seed=i, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    before = server.metric("jetspec_compiles_since_ready")  # by other tests of this process
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        whole, pieces = list(pool.map(ask, range(12))), list(pool.map(streamed, range(12)))
    assert server.metric("jetspec_compiles_since_ready") == before
    wanted = speculate.generate(
        TARGET, None, [[5 + i, 6] for i in range(12)], None,
        [SamplingConfig(20 + i, temperature=1.0, seed=i) for i in range(12)],
    )  # fmt: skip
    assert [got.choices[0].text for got in whole] == pieces == [result.text for result in wanted]
    assert server.metric("jetspec_slots_used") == 0


def test_the_next_turn_of_a_chat_is_not_read_again(client):
    first = client.chat.completions.create(
        model="tiny", messages=messages("tell me a long story"), max_tokens=30, seed=1
    )
    talk = [*messages("tell me a long story"), {"role": "assistant", "content": first.choices[0].message.content}]
    second = client.chat.completions.create(model="tiny", messages=[*talk, *SAY], max_tokens=20, seed=3)
    wanted = offline(TARGET.encode_messages([*talk, *SAY]), temperature=1.0, seed=3, max_new_tokens=20)
    assert second.choices[0].message.content == wanted.text
    assert second.usage.prompt_tokens_details.cached_tokens > 30


REFUSED = [
    (b"{", 400, None, "not JSON"),
    (b"\xff\xfe{}", 400, None, "not UTF-8"),
    (b"[1, 2]", 400, None, "JSON object"),
    (b"[" * 3000, 400, None, "not JSON"),
    (b'{"messages": "x"' + b" " * 5000 + b"}", 413, None, "more than 4096 bytes"),
    ({}, 400, "messages", "missing"),
    ({"messages": []}, 400, "messages", "list of {role, content}"),
    ({"messages": [{"role": "user"}]}, 400, "messages", "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "image_url"),
    ({"messages": SAY, "model": "gpt-9"}, 404, "model", "gpt-9"),
    ({"messages": SAY, "colour": 1}, 400, "colour", "no such option"),
    ({"messages": SAY, "tools": [{"type": "function"}]}, 400, "tools", "cannot"),
    ({"messages": SAY, "response_format": {"type": "json_object"}}, 400, "response_format", "cannot"),
    ({"messages": SAY, "temperature": "hot"}, 400, "temperature", "temperature='hot'"),
    ({"messages": SAY, "temperature": -1}, 400, "temperature", "temperature=-1"),
    ({"messages": SAY, "top_p": 0}, 400, "top_p", "top_p=0"),
    ({"messages": SAY, "n": 0}, 400, "n", "n is 0"),
    ({"messages": SAY, "n": 65}, 400, "n", "65 answers at once, and the queue of this server has room for 64"),
    ({"messages": SAY, "seed": -5}, 400, "seed", "seed=-5"),
    ({"messages": SAY, "seed": 2**32 - 1, "n": 2}, 400, "seed", f"0..{2**32 - 2}"),
    ({"messages": SAY, "stop": [""]}, 400, "stop", "at least one character"),
    ({"messages": SAY, "stop": ["x"] * 17}, 400, "stop", "at most 16"),
    ({"messages": SAY, "logit_bias": {"x": 1}}, 400, "logit_bias", "token id"),
    ({"messages": SAY, "logit_bias": {"400": 1}}, 400, "logit_bias", "400 is not a token"),
    ({"messages": SAY, "max_tokens": 1000}, 400, "max_tokens", "prompt of 14 tokens that is 1014, and a slot"),
    ({"messages": SAY, "max_tokens": "many"}, 400, "max_tokens", "max_tokens='many'"),
    ({"messages": SAY, "max_tokens": 4, "max_completion_tokens": 4}, 400, "max_tokens", "together"),
    ({"messages": SAY, "max_tokens": 2, "min_tokens": 3}, 400, None, "min_tokens=3 contradicts max_tokens=2"),
    ({"messages": SAY, "stream": "yes"}, 400, "stream", "true or false"),
    ({"messages": SAY, "stream_options": {"include_usage": True}}, 400, "stream_options", "stream=true"),
    ({"messages": SAY, "top_logprobs": 2}, 400, "top_logprobs", "logprobs=true"),
    ({"messages": SAY, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "0..20"),
    ({"messages": SAY, "thinking": True}, 400, "thinking", "no chat template with a thinking switch"),
    ({"messages": SAY, "chat_template_kwargs": {"x": 1}}, 400, "chat_template_kwargs", "enable_thinking"),
    ({"messages": SAY, "budget": 9}, 400, "budget", "8 nodes"),
    ({"messages": SAY, "return_tree": True}, 400, "return_tree", "stream=true"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, 400, "max_tokens", "a slot has 252"),
]


@pytest.mark.parametrize(("body", "status", "param", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_wrong_is_refused_by_name_and_the_server_lives(server, body, status, param, said):
    got = post(server, CHAT, body)
    error = got.json()["error"]
    assert got.status_code == status and error["param"] == param and said in error["message"], error
    assert "\n" not in error["message"] and error["type"] and set(error) == {"message", "type", "param", "code"}
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    "body",
    [{"prompt": []}, {"prompt": [[]]}, {"prompt": ""}, {"prompt": [4000]}, {"prompt": 5}, {"prompt": {"a": 1}}, {},
     {"prompt": "x", "echo": True}, {"prompt": "x", "suffix": "y"}, {"prompt": "x", "best_of": 3},
     {"prompt": "x", "logprobs": True}, {"prompt": "x", "messages": SAY}],
    ids=range(12),
)  # fmt: skip
def test_prompts_that_are_none_are_refused(server, body):
    got = post(server, TEXT, body)
    assert got.status_code == 400 and got.json()["error"]["message"]


def test_other_paths_and_methods(server):
    for method, path, status in (("GET", "/nothing", 404), ("GET", CHAT, 405), ("POST", "/v1/models", 405)):
        got = httpx.request(method, server.url + path)
        assert got.status_code == status and path in got.json()["error"]["message"]
    models = httpx.get(server.url + "/v1/models").json()["data"]
    assert [m["id"] for m in models] == ["tiny"] and models[0]["max_model_len"] == 252
    assert httpx.get(server.url + "/v1/models/tiny").json()["id"] == "tiny"
    assert httpx.get(server.url + "/v1/models/other").status_code == 404
    page = httpx.get(server.url + "/")
    assert page.status_code == 200 and "<!doctype html>" in page.text.lower()
    assert httpx.get(server.url + "/health/ready").json() == {"status": "ready"}
    assert httpx.get(server.url + "/version").json()["version"]


def test_names_of_requests_and_a_log_without_prompts(server):
    got = post(
        server, TEXT, {"prompt": "secretword", "max_tokens": 3, "ignore_eos": True}, **{"X-Request-Id": "my-name"}
    )
    assert got.headers["x-request-id"] == "my-name" and got.json()["id"] == "cmpl-my-name"
    other = post(server, TEXT, {"prompt": "secretword", "max_tokens": "secret"}, **{"X-Request-Id": "bad name"})
    assert other.headers["x-request-id"] != "bad name"
    named = lambda: [line for line in server.lines if line.startswith("my-name")]
    assert soon(named)
    lines = named()
    assert len(lines) == 1 and f"POST {TEXT} 200 10 prompt tokens, 3 new" in lines[0]
    assert not [line for line in server.lines if "secret" in line]


def test_garbage_on_the_line(server):
    for data in (
        b"\x00\xff\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET / HT\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as line:
            line.sendall(data)
            assert b" 200 " not in line.recv(1000)
    for length in ("x", "9" * 30):
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{{}}".encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as line:
            line.sendall(head)
            assert line.recv(1000).split()[1] in (b"400", b"413")
    assert httpx.get(server.url + "/health").status_code == 200


def test_an_error_of_ours_has_the_shape_of_others(server, monkeypatch, capsys):
    """It is said in one line on stderr, and the server lives."""
    monkeypatch.setattr(Service, "read", lambda *rest: 1 / 0)
    got = post(server, TEXT, {"prompt": "x"})
    assert got.status_code == 500 and got.json()["error"]["type"] == "server_error"
    said = [""]
    assert soon(lambda: "ZeroDivisionError" in (said.append(said[-1] + capsys.readouterr().err) or said[-1]))
    monkeypatch.undo()
    assert post(server, TEXT, {"prompt": "x", "max_tokens": 2}).status_code == 200


def test_bodies_that_come_in_pieces_are_bounded_too(server, monkeypatch):
    """Too many bytes without a length, and one that never ends."""
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as line:
        line.sendall(head + b"400\r\n" + b" " * 0x400 + b"\r\n")
        for _ in range(4):
            line.sendall(b"400\r\n" + b" " * 0x400 + b"\r\n")
        assert line.recv(1000).split()[1] == b"413"
    monkeypatch.setattr("jetspec_jax.serve.app.BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as line:
        line.sendall(head + b"1\r\n{\r\n")
        assert line.recv(1000).split()[1] == b"408"


BROKEN = b"a\xc3", b"\xed\xa0\x80", b"\\ud800", b"\\udfff\\ud800"


@pytest.mark.parametrize(
    ("key", "said"),
    [("prompt", BROKEN[0]), *(("stop", said) for said in BROKEN), ("bad_words", BROKEN[2])],
    ids=range(6),
)  # of prompts a real tokenizer refuses the others
def test_broken_text_is_refused(server, key, said):
    """Half a character, and half a pair of surrogates, raw and escaped."""
    value = b'"' + said + b'"' if key == "prompt" else b'["' + said + b'"]'
    other = b"" if key == "prompt" else b'"prompt": "x", '
    got = post(server, TEXT, b"{" + other + b'"max_tokens": 2, "' + key.encode() + b'": ' + value + b"}")
    error = got.json()["error"]
    assert got.status_code == 400 and ("UTF-8" in error["message"] or error["param"] == key), error


def slow_reader(server, **more) -> socket.socket:
    """A caller whose answer is some megabytes, and who has read nothing of it."""
    body = {"prompt": [5, 6], "n": 16, "max_tokens": 200, "ignore_eos": True, "logprobs": 20, "seed": 3, "stream": True}
    data = json.dumps(body | more).encode()
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.settimeout(20)
    line.connect(("127.0.0.1", server.port))
    line.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return line


def test_a_slow_reader_holds_up_nobody(server):
    """Slots are free while its answer still waits, others have theirs; read at last, it is whole."""
    with slow_reader(server) as line:
        assert soon(lambda: server.service.scheduler.running)
        got = post(server, TEXT, {"prompt": [7, 8], "max_tokens": 9, "seed": 4}).json()["choices"][0]["text"]
        assert got == offline([7, 8], temperature=1.0, seed=4, max_new_tokens=9).text
        assert server.quiet(60) and server.service.exchanges >= 1
        assert [line.recv(1) for _ in range(9)] == [b"%c" % c for c in b"HTTP/1.1 "]
        data = b""
        while b"data: [DONE]" not in data[-100:]:
            data += line.recv(1 << 16)
    text = [""] * 16
    for event in data.decode().split("data: ")[1:]:
        if event.startswith("{"):
            (choice,) = json.loads(event.partition("\n")[0].strip())["choices"]
            text[choice["index"]] += choice["text"]
    options = [SamplingConfig(200, temperature=1.0, seed=3 + i, ignore_eos=True) for i in range(16)]
    assert text == [result.text for result in speculate.generate(TARGET, None, [[5, 6]] * 16, None, options)]
    assert soon(lambda: server.service.exchanges == 0)


def test_who_reads_nothing_at_all_is_let_go(server, monkeypatch):
    monkeypatch.setattr("jetspec_jax.serve.exchange.STALLED_SECONDS", 0.3)
    before = sum(" 499 " in line for line in server.lines)
    with slow_reader(server):
        assert soon(lambda: sum(" 499 " in line for line in server.lines) > before, 60)
        assert server.quiet() and soon(lambda: server.service.exchanges == 0)
    assert post(server, TEXT, {"prompt": [7, 8], "max_tokens": 2}).status_code == 200


def test_a_full_queue_is_429_at_once(server, monkeypatch):
    monkeypatch.setattr(server.service.scheduler, "most", 1)
    begin = time.monotonic()
    got = post(server, TEXT, {"prompt": "x", "n": 2, "max_tokens": 2})
    assert got.status_code == 429 and got.headers["retry-after"] == "1" and time.monotonic() - begin < 1
    assert got.json()["error"]["code"] == "queue_full"
    assert post(server, TEXT, {"prompt": "x", "max_tokens": 2}).status_code == 200


def slowly(monkeypatch, seconds: float = 0.03) -> None:
    """Each block takes a while, as those of real models do."""
    launch = Slots.launch
    monkeypatch.setattr(Slots, "launch", lambda self, *rest: (time.sleep(seconds), launch(self, *rest))[1])
    monkeypatch.setattr("jetspec_jax.serve.scheduler.BLOCK_SECONDS", 0.0)


def test_fifty_who_hang_up_leave_no_slot_busy(server, monkeypatch):
    """Half of them stream; somebody who stays has the right answer."""
    slowly(monkeypatch)
    before = server.metric("jetspec_cancelled_total")
    lines = []
    body = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True}
    for i in range(50):
        data = json.dumps(body | {"stream": i % 2 == 0}).encode()
        line = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        line.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        lines.append(line)
    while server.service.scheduler.running < 4:
        time.sleep(0.01)
    for line in lines:
        line.close()
    begin = time.monotonic()
    assert server.quiet() and time.monotonic() - begin < 2
    monkeypatch.undo()
    assert server.metric("jetspec_cancelled_total") - before == 50 and server.metric("jetspec_slots_used") == 0
    while slots().batch > 1:
        time.sleep(0.005)
    assert all(slots()._state.reason)
    assert soon(lambda: sum(" 499 " in line for line in server.lines) >= 50)
    got = post(server, TEXT, {"prompt": [7, 8], "max_tokens": 9, "seed": 4}).json()["choices"][0]["text"]
    assert got == offline([7, 8], temperature=1.0, seed=4, max_new_tokens=9).text
    assert soon(lambda: server.service.exchanges == 0)


def test_metrics_have_the_names_that_tools_read(server):
    text = httpx.get(server.url + "/metrics").text
    for name in (
        "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_draft_tokens_total", "sglang:spec_accept_length", "sglang:spec_accept_rate",
        "jetspec_queue_size", "jetspec_slots_used", "jetspec_time_to_first_token_seconds_bucket",
        "jetspec_time_per_output_token_seconds_bucket", "jetspec_rounds_total", "jetspec_budget_nodes",
        "jetspec_compiles_since_ready", "jetspec_cancelled_total",
    ):  # fmt: skip
        assert name in text, name


def test_load_is_measured(server, tmp_path, capsys):
    """Each level asks for the same answers, and its numbers are those of its answers."""
    words = ["--url", server.url, "--clients", "1", "3", "--rate", "200", "--requests", "6", "--max_new_tokens", "16"]
    assert serve_bench.main([*words, "--out", str(tmp_path / "load.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "load.jsonl").read_text().splitlines()]
    levels, calls = lines[6::7], [line for line in lines if "ttft" in line]
    assert len(levels) == 3 and len(calls) == 18
    assert {call["tokens"] for call in calls} == {16} and all(0 < call["ttft"] <= call["seconds"] for call in calls)
    assert [level.get("clients", level.get("rate")) for level in levels] == [1, 3, 200.0]
    for level in levels:
        assert level["requests"] == 6 and level["errors"] == 0 and level["budget"] == served.NODES
        assert level["tokens_per_second"] == pytest.approx(96 / level["seconds"])
    assert len({level["acceptance_length"] for level in levels}) == 1
    assert "| 3 clients | 6 | 0 |" in capsys.readouterr().out
    assert serve_bench.main(["--url", "http://127.0.0.1:9", "--clients", "1"]) == 1
    assert "no server answers there" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_in_a_browser(server):
    """A talk, its tree and its numbers; what the server refuses is shown."""
    browsers = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or pytest.skip("no chromium here")
    with browsers.sync_playwright() as play:
        page = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page()
        wrong = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.goto(server.url)
        page.fill("#most", "30")
        page.fill("#say", "hello there")
        page.press("#say", "Enter")
        page.wait_for_function("document.getElementById('rate').textContent !== '-'")
        page.wait_for_function("document.getElementById('send').textContent === 'Send'")
        wanted = offline(TARGET.encode_messages(SAY), max_new_tokens=30).text
        assert page.inner_text(".assistant").strip() == wanted.strip()
        assert float(page.inner_text("#rate")) > 0 and page.inner_text("#plain") == "not measured"
        assert page.locator("#tree svg text").count() == served.NODES and not wrong
        page.fill("#most", "5000")
        page.fill("#say", "more")
        page.press("#say", "Enter")
        page.wait_for_selector(".wrong")
        assert "max_tokens=5000" in page.inner_text(".wrong")


@pytest.mark.usefixtures("server")
class TestAlone:
    """Servers of their own: the module's has let go of the slots."""

    @pytest.fixture(autouse=True)
    def free(self, server):
        if not server.service.scheduler._stopping:
            assert server.quiet()
            server.service.scheduler.stop()

    def test_a_key_is_asked_for(self):
        with served.running(Limits(key="open")) as running:
            for key, status in (
                ({}, 401),
                ({"Authorization": "Bearer shut"}, 401),
                ({"Authorization": "Bearer open"}, 200),
            ):
                got = post(running, TEXT, {"prompt": "x", "max_tokens": 2}, **key)
                assert got.status_code == status
                assert status == 200 or "API key" in got.json()["error"]["message"]
            assert httpx.get(running.url + "/health").status_code == 200
            with pytest.raises(openai.AuthenticationError):
                openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0).models.list()

    def test_shutting_down_loses_no_accepted_answer(self, monkeypatch):
        slowly(monkeypatch, 0.01)
        submit, accepted = Scheduler.submit, []
        monkeypatch.setattr(Scheduler, "submit", lambda self, *jobs: (submit(self, *jobs), accepted.extend(jobs)))
        with served.running() as running, concurrent.futures.ThreadPoolExecutor(16) as pool:
            asked = [
                pool.submit(
                    post, running, TEXT, {"prompt": [5 + i, 6], "max_tokens": 20, "seed": i, "stream": i % 2 == 0}
                )
                for i in range(16)
            ]
            while len(accepted) < 16:
                time.sleep(0.005)
            drained = running.drain(20)
            while not running.service.draining:
                time.sleep(0.005)
            late = post(running, TEXT, {"prompt": "x"})
            assert late.status_code == 503 and httpx.get(running.url + "/health/ready").status_code == 503
            answers = [one.result() for one in asked]
            drained.result(20)
            assert running.service.exchanges == 0
        for i, got in enumerate(answers):
            wanted = offline([5 + i, 6], temperature=1.0, seed=i, max_new_tokens=20).text
            if i % 2:
                assert got.json()["choices"][0]["text"] == wanted
            else:
                events = [line[6:] for line in got.text.splitlines() if line.startswith("data: ")]
                assert events[-1] == "[DONE]"
                assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == wanted

    def test_what_does_not_end_in_time_is_told_so(self, monkeypatch):
        slowly(monkeypatch, 0.05)
        with served.running() as running, concurrent.futures.ThreadPoolExecutor(2) as pool:
            body = {"prompt": [5, 6], "max_tokens": 240, "ignore_eos": True, "temperature": 0}
            whole = pool.submit(post, running, TEXT, body)
            streamed = pool.submit(post, running, TEXT, body | {"stream": True})
            while running.service.scheduler.running < 2:
                time.sleep(0.005)
            running.drain(0.1).result(10)
            got = whole.result()
            assert got.status_code == 500 and "shutting down" in got.json()["error"]["message"]
            assert "shutting down" in streamed.result().text.splitlines()[-4]

    def test_before_it_is_ready_it_says_so(self):
        service = Service("tiny", Limits())
        assert not service.ready
        with pytest.raises(Exception, match="being loaded and compiled") as caught:
            service.running()
        assert caught.value.status == 503


def test_a_caller_who_never_reads_does_not_keep_the_server_from_ending():
    """An answer that is being given when the time is up gets half a second more, and no longer."""
    service = Service("m", Limits())
    service.exchanges = 1
    begin = time.monotonic()
    asyncio.run(asyncio.wait_for(service.drain(0.1), 5))
    assert time.monotonic() - begin < 2 and service.draining
