"""Answers in the shape of OpenAI's interface: whole ones, chunks of a stream, usage, and what speculation did."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from jetspec_jax.engine.rows import Result
from jetspec_jax.serve.bodies import Asked
from jetspec_jax.serve.job import Job, Piece

LEAST = -9999.0  # a log-probability in JSON, which has no infinity


@dataclasses.dataclass(frozen=True)
class Form:
    """What all parts of an answer share.

    name: the request's id. model: its name. tokenizer: of the target; None gives ids for text. depth: of a draft.
    """

    asked: Asked
    name: str
    model: str
    fingerprint: str
    tokenizer: Any
    depth: int
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def whole(self, jobs: Sequence[Job], results: Sequence[Result]) -> dict[str, Any]:
        """Returns the answer with all choices."""
        choices = []
        for index, (job, result) in enumerate(zip(jobs, results, strict=True)):
            count = len(self._shown(result))
            logprobs = self._logprobs(result.token_ids[:count], result.logprobs, job.top)
            if self.asked.chat:
                said: dict[str, Any] = {"message": {"role": "assistant", "content": result.text, "refusal": None}}
            else:
                said = {"text": result.text}
            end = {"logprobs": logprobs, "finish_reason": result.finish_reason, "stop_reason": result.stopped_by}
            choices.append({"index": index} | said | end)
        kind = "chat.completion" if self.asked.chat else "text_completion"
        return self._head(kind) | {"choices": choices} | self._end(jobs, results)

    def opening(self, index: int) -> dict[str, Any]:
        """Returns the first chunk of a choice of a chat."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, index: int, piece: Piece, result: Result | None) -> dict[str, Any] | None:
        """Returns a chunk for what is new of a choice; None where that is nothing."""
        ids = piece.ids if result is None else piece.ids[: len(piece.ids) - self._hidden(result)]
        logprobs = self._logprobs(ids, piece.logprobs, piece.top)
        tree = {"tree": self._tree(piece)} if piece.draft else {}
        if not (piece.text or logprobs or tree or result):
            return None
        said = {"content": piece.text} if self.asked.chat else {"text": piece.text}
        return self._chunk(index, said, logprobs, result) | tree

    def last(self, jobs: Sequence[Job], results: Sequence[Result]) -> dict[str, Any]:
        """Returns the chunk with the usage, after all choices."""
        return self._head(self._kind()) | {"choices": []} | self._end(jobs, results)

    def _kind(self) -> str:
        return "chat.completion.chunk" if self.asked.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.name, "object": kind, "created": self.created, "model": self.model}
        return head | {"system_fingerprint": self.fingerprint, "seed": self.asked.option.seed}

    def _chunk(self, index: int, said: dict, logprobs: Any, result: Result | None) -> dict[str, Any]:
        reason = result.finish_reason if result else None
        choice = {"index": index} | ({"delta": said} if self.asked.chat else said)
        choice |= {"logprobs": logprobs, "finish_reason": reason}
        if result:
            choice["stop_reason"] = result.stopped_by
        return self._head(self._kind()) | {"choices": [choice]} | ({"usage": None} if self.asked.usage else {})

    def _end(self, jobs: Sequence[Job], results: Sequence[Result]) -> dict[str, Any]:
        """Returns usage and metrics."""
        prompts = [len(ids) for ids in self.asked.prompts]
        made = sum(result.new_tokens for result in results)
        cached = sum(job.reused for job in jobs[:: self.asked.choices])
        seconds = {key: round(max(r.seconds[key] for r in results), 6) for key in ("queue", "prefill", "decode")}
        after = sum(max(result.new_tokens - 1, 0) for result in results)
        spent = {
            "speculative": sum(result.seconds["decode"] for result in results),
            "plain": sum(job.plain for job in jobs),
        }
        rates = {key: round(after / total, 3) if total else None for key, total in spent.items()}
        return {
            "usage": {
                "prompt_tokens": sum(prompts),
                "completion_tokens": made,
                "total_tokens": sum(prompts) + made,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
            "metrics": {
                "speculative_decoding": speculation(results, self.depth),
                "seconds": seconds,
                "tokens_per_second": rates,
            },
        }

    def _shown(self, result: Result) -> list[int]:
        return result.token_ids[: len(result.token_ids) - self._hidden(result)]

    def _hidden(self, result: Result) -> int:
        """Returns how many tokens at the end are no part of the text: an end token is none."""
        return int(isinstance(result.stopped_by, int) and not self.asked.option.include_stop_text)

    def _tree(self, piece: Piece) -> dict[str, Any]:
        draft = piece.draft
        assert draft is not None
        return {"tokens": [self._text(i) for i in draft.tokens], "parents": draft.parents, "accepted": draft.path}

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token]) if self.tokenizer else f"<{token}>"

    def _logprobs(self, ids: Sequence[int], values: Sequence[float] | None, top: Sequence | None) -> Any:
        """Returns the log-probabilities of some tokens; None where they are not asked for."""
        if self.asked.top is None or values is None or top is None:
            return None
        rows = list(zip(ids, values, top, strict=False))
        if self.asked.chat:
            entry = lambda token, value: {
                "token": self._text(token),
                "logprob": max(value, LEAST),
                "bytes": self._bytes(token),
            }
            best = lambda pairs: [entry(*pair) for pair in pairs[: self.asked.top]]
            return {"content": [entry(i, v) | {"top_logprobs": best(pairs)} for i, v, pairs in rows], "refusal": None}
        texts = [self._text(i) for i in ids]
        offsets = [sum(map(len, texts[:n])) for n in range(len(texts))]
        best_texts = [{self._text(i): max(v, LEAST) for i, v in pairs[: self.asked.top]} for _, _, pairs in rows]
        return {
            "tokens": texts,
            "token_logprobs": [max(v, LEAST) for _, v, _ in rows],
            "top_logprobs": best_texts if self.asked.top else None,
            "text_offset": offsets,
        }

    def _bytes(self, token: int) -> list[int] | None:
        """Returns the bytes of a token's text; None where it is a part of a character."""
        text = self._text(token)
        return None if "\ufffd" in text else list(text.encode())


def speculation(results: Sequence[Result], depth: int) -> dict[str, Any]:
    """Returns what rounds gave out: every count is of tokens that the caller got, whatever was verified beyond.

    depth: drafted positions of a round.
    """
    emitted = [count for result in results for count in result.emitted]
    accepted = sum(emitted) - len(emitted)
    drafted = sum(size - 1 for result in results for size in result.tree_sizes)
    histogram = [emitted.count(number + 1) for number in range(depth + 1)]
    return {
        "mean_acceptance_length": 1 + accepted / len(emitted) if emitted else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(emitted),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": depth,
    }
