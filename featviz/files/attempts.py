"""Requests to a store: a few attempts with growing pauses, and plain words for what went wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from featviz.errors import FileError
from featviz.files.urls import Url
from featviz.text import counted, quoted

log = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPTS = 4
"""How often something is asked for before it counts as failed."""
FIRST_WAIT = 0.5
"""Seconds before the second attempt; each further one waits twice as long."""
PATIENCE = 120.0
"""Seconds after which there is no further attempt, and a file that still comes in is given up."""

_TRY_AGAIN = (408, 425, 429)
"""Answers of the 400s that are about the moment, and not about the request."""
_FINAL = (
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ValueError,
    TypeError,
)
"""Errors that the next attempt would meet again."""


def tried(url: Url, task: Callable[[float], T]) -> T:
    """Do something over a network, with growing pauses between the attempts.

    Libraries raise what they like, botocore's errors and those of aiohttp among it, so all is
    taken for the store's answer.

    Args:
        url: leads to the store; its user and password stand in no message.
        task: gets the time, by `time.monotonic`, at which it has to end.

    Raises:
        FileNotFoundError: there is no such file or bucket.
        FileExistsError: there is one already.
        FileError: that of the task, or one with the reason, caused by the library's error.
    """
    until, wait = time.monotonic() + PATIENCE, FIRST_WAIT
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return task(until)
        except (FileNotFoundError, FileExistsError, FileError):
            raise
        except Exception as error:
            if _status(error) == 404:
                raise FileNotFoundError(words(url, error)) from error
            if _is_final(error):
                raise FileError(words(url, error)) from error
            if attempt == ATTEMPTS or time.monotonic() + wait > until:
                after = f" ({counted(attempt, 'attempt')})" if attempt > 1 else ""
                raise FileError(words(url, error) + after) from error
            log.debug("%s: attempt %d of %d: %s", url, attempt, ATTEMPTS, words(url, error))
        time.sleep(wait)
        wait *= 2
    raise AssertionError("the last attempt returns or raises")


def words(url: Url, error: Exception) -> str:
    """What went wrong, without credentials: those stand in the URLs that libraries quote."""
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return "the store refuses access: are the credentials there?"
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return "the store did not answer in time"
    if status := _status(error):
        return f"the server answers {status} {_shown(url, getattr(error, 'message', ''))}"
    return _shown(url, error) or type(error).__name__


def lacks_rights(error: BaseException | None) -> bool:
    """Whether a store refused, or its library found no credentials to send."""
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return True
    return isinstance(error, Exception) and _status(error) in (401, 403)


def _shown(url: Url, said: Any) -> str:
    return quoted(url.without_secrets(str(said)).strip())


def _is_final(error: Exception) -> bool:
    status = _status(error)
    if status is not None:
        return 400 <= status < 500 and status not in _TRY_AGAIN
    return isinstance(error, _FINAL) or lacks_rights(error)


def _status(error: Exception) -> int | None:
    """The status of an answer over HTTP that was an error."""
    status = getattr(error, "status", None) or getattr(
        getattr(error, "response", None), "status_code", None
    )
    return status if isinstance(status, int) else None
