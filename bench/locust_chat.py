"""Load on a server by locust: chats, streamed and whole, some of whose callers leave in the middle.

    pip install locust
    locust -f bench/locust_chat.py --headless --users 4 --run-time 60s --host http://127.0.0.1:8000

Every answer is checked: its status, its end, its usage, and that what speculation did adds up. A failure is the exit
status.
"""

from __future__ import annotations

import json
import random

from locust import HttpUser, between, task

ASKS = (
    "What is 2 + 2?", "Name three rivers.", "Write a Python function that adds two numbers.", "Why is the sky blue?",
    "Natalia sold 48 clips in April and half as many in May. How many did she sell in both months?",
)  # fmt: skip
PATH = "/v1/chat/completions"


class Caller(HttpUser):
    """Asks, waits a moment, and asks again."""

    wait_time = between(0.0, 0.5)

    @task(4)
    def whole(self) -> None:
        with self.client.post(PATH, json=body(), name="whole", catch_response=True) as got:
            if got.status_code != 200:
                got.failure(f"{got.status_code}: {got.text[:200]}")
            elif wrong := check(got.json()):
                got.failure(wrong)

    @task(4)
    def streamed(self) -> None:
        more = {"stream": True, "stream_options": {"include_usage": True}}
        with self.client.post(PATH, json=body() | more, name="streamed", stream=True, catch_response=True) as got:
            events = [line[6:] for line in got.iter_lines(decode_unicode=True) if line.startswith("data: ")]
            if events[-1:] != ["[DONE]"]:
                got.failure(f"{got.status_code}: the stream does not end with [DONE]")
            elif wrong := check(json.loads(events[-2])):
                got.failure(wrong)

    @task(1)
    def left(self) -> None:
        with self.client.post(
            PATH, json=body() | {"stream": True}, name="left", stream=True, catch_response=True
        ) as got:
            next(got.iter_lines(), None)
            got.success()


def body() -> dict:
    """A request."""
    return {
        "messages": [{"role": "user", "content": random.choice(ASKS)}], "max_tokens": random.randrange(8, 48),
        "temperature": random.choice((0.0, 1.0)),
    }  # fmt: skip


def check(answer: dict) -> str | None:
    """What is wrong with an answer, or the last event of a stream; None where nothing is."""
    usage, found = answer["usage"], answer["metrics"]["speculative_decoding"]
    histogram, steps = found["acceptance_histogram"], found["num_spec_steps"]
    accepted = sum(i * n for i, n in enumerate(histogram))
    right = (
        usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"],
        sum(histogram) == steps,
        accepted == found["num_accepted_draft_tokens"] <= found["num_draft_tokens"],
        usage["completion_tokens"] == 1 + steps + accepted,
    )
    return None if all(right) else f"the counts do not add up: {usage}, {found}"
