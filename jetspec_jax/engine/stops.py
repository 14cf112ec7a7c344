"""Stop strings: text that grows token by token, until it contains one of them."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """The text of one row's new tokens, ended by the first stop string.

    A stop string counts once the token that completes it has come, and only if that token is not among the first
    `after`. Of several that a token completes, the one that begins first ends the text, then the shortest. What this
    finds depends on the ids alone and not on how many come at once.
    """

    def __init__(self, tokenizer, stops: Sequence[str] = (), include: bool = False, after: int = 0):
        """tokenizer: has `stream_decoder()`. include: whether the text keeps the stop string."""
        self._decoder = tokenizer.stream_decoder()
        self._stops, self._include, self._after = tuple(stops), include, after
        self._text = ""
        self.over = False  # no more ids are taken in
        self.count = 0  # ids taken in; once a stop string is found, those up to the token that completes it
        self.found: str | None = None

    def push(self, ids: Sequence[int]) -> None:
        """Takes in ids, up to the one that completes a stop string."""
        if not self._stops:
            self.count += len(ids)
            self._text += self._decoder.push(ids)
            return
        for i in ids:
            if self.over:
                return
            self.count += 1
            old = len(self._text)
            self._text += self._decoder.push([i])
            if self.count > self._after and len(self._text) > old:
                self._search(old)

    def finish(self) -> None:
        """Ends the text: no more ids will come."""
        if not self.over:
            self._text += self._decoder.finish()
        self.over = True

    @property
    def settled(self) -> str:
        """The text that no later id can take back: without an end that may become a stop string."""
        if self.over:
            return self._text
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stops):
                return self._text[:-size]
        return self._text

    def _search(self, old: int) -> None:
        """Looks for a stop string that ends after the first `old` characters."""
        hits = [(self._text.find(stop, max(0, old - len(stop) + 1)), len(stop), stop) for stop in self._stops]
        hits = [hit for hit in hits if hit[0] >= 0]
        if hits:
            start, size, self.found = min(hits)
            self.over = True
            self._text = self._text[: start + (size if self._include else 0)]
