"""Counters for Prometheus, under names of our own and those that tools already scrape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jetspec_jax.engine.rows import Result
from jetspec_jax.serve.answers import speculation
from jetspec_jax.serve.job import Job

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        counter = lambda name, help, *labels: Counter(name, help, labels, registry=registry)
        histogram = lambda name, help, buckets: Histogram(name, help, buckets=buckets, registry=registry)
        self.answers = counter("jetspec_http_requests", "Answers by path and status.", "path", "status")
        self.prompt_tokens = counter("jetspec_prompt_tokens", "Tokens of prompts.")
        self.reused_tokens = counter("jetspec_prompt_tokens_reused", "Of them, those that were there already.")
        self.new_tokens = counter("jetspec_generated_tokens", "Tokens of answers.")
        self.first = histogram("jetspec_time_to_first_token_seconds", "From request to first token.", SECONDS)
        self.queued = histogram("jetspec_queue_seconds", "Waiting for a slot.", SECONDS)
        self.each = histogram("jetspec_time_per_output_token_seconds", "After the first, per token.", TOKEN_SECONDS)
        self.whole = histogram("jetspec_request_seconds", "From request to end.", SECONDS)
        self.events = {
            name: counter(f"jetspec_{name}", help)
            for name, help in (
                ("rounds", "Rounds of batches."),
                ("blocks", "Launches of rounds."),
                ("pieces", "Pieces of prompts that were read."),
                ("cancelled", "Choices whose caller has gone."),
                ("finished", "Choices that ended by themselves."),
            )
        }
        self.sizes = counter("jetspec_rounds_of_nodes", "Rounds of batches by the nodes of their trees.", "nodes")
        self.drafts = counter("vllm:spec_decode_num_drafts", "Rounds of requests.")
        self.accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were given out.")
        self.drafted = counter("vllm:spec_decode_num_draft_tokens", "Drafted nodes that were verified.")
        self._gauge("sglang:spec_accept_length", "Tokens a round gave out, since the start.", self._length)
        self._gauge("sglang:spec_accept_rate", "Share of drafted nodes that were given out.", self._rate)
        self._sums = [0, 0, 0]  # rounds, accepted, drafted

    def watch(self, gauges: Sequence[tuple[str, str, Callable[[], float]]]) -> None:
        """Adds gauges that are read when they are asked for: name, help, value."""
        for name, help, read in gauges:
            self._gauge(f"jetspec_{name}", help, read)

    def event(self, name: str, value: float) -> None:
        """Counts what the scheduler says has happened."""
        if name in self.events:
            self.events[name].inc(value)
        elif name.startswith("rounds of "):
            self.sizes.labels(name.removeprefix("rounds of ")).inc(value)

    def ended(self, job: Job, result: Result, depth: int) -> None:
        """Counts an answer."""
        seconds, found = result.seconds, speculation([result], depth)
        self.prompt_tokens.inc(result.prompt_tokens)
        self.reused_tokens.inc(job.reused)
        self.new_tokens.inc(result.new_tokens)
        self.queued.observe(seconds["queue"])
        self.first.observe(seconds["queue"] + seconds["prefill"])
        self.whole.observe(sum(seconds.values()))
        if result.new_tokens > 1:
            self.each.observe(seconds["decode"] / (result.new_tokens - 1))
        counts = [found[f"num_{name}"] for name in ("spec_steps", "accepted_draft_tokens", "draft_tokens")]
        self._sums = [old + new for old, new in zip(self._sums, counts, strict=True)]
        for counter, count in zip((self.drafts, self.accepted, self.drafted), counts, strict=True):
            counter.inc(count)

    def text(self) -> bytes:
        """Returns all of them as Prometheus reads them."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        Gauge(name, help, registry=self._registry).set_function(read)

    def _length(self) -> float:
        rounds, accepted, _ = self._sums
        return 1 + accepted / rounds if rounds else 0.0

    def _rate(self) -> float:
        return self._sums[1] / self._sums[2] if self._sums[2] else 0.0
