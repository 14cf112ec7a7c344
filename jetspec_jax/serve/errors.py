"""What goes wrong with a request, in the shape of OpenAI's interface."""

from __future__ import annotations

from typing import Any

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused, with its HTTP status.

    message: one line for the caller. param: the key that is wrong. code: a word for programs. wait: seconds after which
    it may be sent again.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, wait: int | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.wait = status, message, param, code, wait

    def body(self) -> dict[str, Any]:
        """Returns the body of the answer."""
        return shape(self.status, self.message, self.param, self.code)

    def headers(self) -> dict[str, str]:
        """Returns its headers."""
        return {} if self.wait is None else {"Retry-After": str(self.wait)}


def shape(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns an error as OpenAI's clients read it."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
