"""The Hub by its own client: ORG/NAME[@REVISION], errors in plain words, trying again.

The client itself repeats uploads of large files and downloads that fail. What it sends only once (a
commit, a new repository, a look-up) is repeated here. The loop is written by hand: with tenacity it
is 12 lines longer, since the wait depends on the error. Tokens come from the environment or the
Hub's own login and never appear in a message.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from medusa_kit import console
from medusa_kit.base.names import unreached, use_hub_if_reached
from medusa_kit.base.retry_after import LONGEST_WAIT, seconds_to_wait
from medusa_kit.errors import HubError, MedusaKitError, UsageError
from medusa_kit.paths import expanded, whole

DESCRIPTIONS = "*.json"  # of heads; fetched first, since they say which weights are needed
ATTEMPTS = 5
FIRST_WAIT = 1.0  # seconds, doubled at every attempt
TRANSIENT = (408, 429, 500, 502, 503, 504)
LOGIN_HINT = "log in with `hf auth login`, or set HF_TOKEN to a token from hf.co/settings/tokens"
MESSAGE_LENGTH = 300
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(.+))?", re.ASCII)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class HubName:
    """A repository on the Hub, and a branch, tag or commit of it."""

    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> "HubName":
        """Raises UsageError for anything but ORG/NAME or ORG/NAME@REVISION."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise UsageError(
                f"{text!r} is no repository on the Hub, expected ORG/NAME or ORG/NAME@REVISION",
                hint="ORG is your user name or an organisation",
            )
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def on_hub(text: str | Path) -> HubName | None:
    """The repository that `text` names; None where it is a folder, or can only be one."""
    if isinstance(text, Path) or text.startswith((".", "~", "/")) or Path(text).is_dir():
        return None
    return HubName.parse(text) if _NAME.fullmatch(text) else None


def heads_folder(name: str | Path, weights: Callable[[Path], Sequence[str]]) -> Path:
    """The folder with the heads of this name. Heads on the Hub are fetched into its cache.

    `weights`: gives patterns of the weight files to fetch, from a folder with the JSON files.
    A local folder need not exist: reading it says what is missing. Raises HubError.
    """
    hub_name = on_hub(name)
    if hub_name is None:
        return whole(name) if expanded(name).exists() else expanded(name)
    from huggingface_hub import snapshot_download

    def fetch(patterns: list[str]) -> Path:
        options = {"revision": hub_name.revision, "allow_patterns": patterns}
        return Path(snapshot_download(hub_name.repository, **options))

    what = f"no folder {str(hub_name)!r} here, nor heads on the Hub"
    json_folder = with_retries(what, hub_name, lambda: fetch([DESCRIPTIONS]))
    return with_retries(what, hub_name, lambda: fetch([DESCRIPTIONS, *weights(json_folder)]))


def with_retries(what: str, name: HubName, call: Callable[[], _Result]) -> _Result:
    """The call's result. It is repeated, up to ATTEMPTS times in all, where waiting may help.

    Raises HubError whose message begins with `what`.
    """
    use_hub_if_reached()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except MedusaKitError:
            raise
        except Exception as error:  # errors of the client, of its HTTP library or of the disk
            wait = _wait(error, attempt)
            if wait is None or attempt == ATTEMPTS:
                raise _hub_error(what, name, error) from error
            console.warn(f"{what}: {_first_line(error)}; trying again in {wait:g} s")
            time.sleep(wait)
    raise AssertionError("unreachable")


def check_login(what: str, name: HubName) -> None:
    """Raises HubError where there is no token, in the environment or from the Hub's login."""
    from huggingface_hub import get_token

    if with_retries(what, name, get_token) is None:
        raise HubError(f"{what}: no token", hint=LOGIN_HINT)


def _token() -> str | None:
    from huggingface_hub import get_token

    try:
        return get_token()
    except Exception:  # a login that cannot be read; `check_login` reports it
        return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes: the client wraps errors of its threads."""
    causes: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in causes:
        causes.append(current)
        yield current
        current = current.__cause__ or current.__context__


def _find(error: BaseException, *kinds: type) -> Any:
    return next((cause for cause in _chain(error) if isinstance(cause, kinds)), None)


def _wait(error: Exception, attempt: int) -> float | None:
    """Seconds until another attempt makes sense; None where none does."""
    from huggingface_hub import errors

    http_error = _find(error, errors.HfHubHTTPError)
    wait = min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT)
    if http_error is not None:
        if http_error.response.status_code not in TRANSIENT:
            return None
        return seconds_to_wait(http_error.response.headers.get("Retry-After"), wait)
    # The client's HTTP library differs by its version; all of its errors have this parent.
    transport_error = _find(error, errors.HTTPError)
    unreachable = ("ConnectError", "UnsupportedProtocol")
    if transport_error is None or type(transport_error).__name__ in unreachable:
        return None
    return wait


def _hub_error(what: str, name: HubName, error: Exception) -> HubError:
    message, hint = _explanation(name, error)
    return HubError(f"{what}: {without_token(message)}", hint=hint)


def _explanation(name: HubName, error: Exception) -> tuple[str, str]:
    """(what happened, what to do about it)."""
    from huggingface_hub import constants, errors

    if constants.ENDPOINT in unreached:
        return f"{constants.ENDPOINT} cannot be reached", "check the network"
    if _find(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE keeps the Hub's client from the network", "unset HF_HUB_OFFLINE"
    if _find(error, errors.HFValidationError):
        return _first_line(error), "a name has letters, digits, '-', '_' and '.', 96 at most"
    if _find(error, errors.RevisionNotFoundError):
        revision = name.revision or "main"
        return f"it has no revision {revision!r}", "name a branch, a tag or a commit of it"
    if _find(error, errors.GatedRepoError):
        return _first_line(
            error
        ), f"accept its conditions on {constants.ENDPOINT}/{name.repository}"
    http_error = _find(error, errors.HfHubHTTPError)
    status = None if http_error is None else http_error.response.status_code
    if status == 401 and _token() is not None and not _find(error, errors.RepositoryNotFoundError):
        return (
            f"the Hub does not accept your token (401: {_server_message(http_error)})",
            LOGIN_HINT,
        )
    if _find(error, errors.RepositoryNotFoundError) or status == 401:
        return "there is no such repository, or you may not see it", f"check the name; {LOGIN_HINT}"
    if status == 403:
        return (f"your token may not do that (403: {_server_message(http_error)})",
                f"use a token with write access to {name.repository.split('/')[0]}")  # fmt: skip
    if status == 429:
        return "too many requests (429)", "wait some minutes and run the same command again"
    if http_error is None and _find(error, errors.HTTPError):
        return (f"no connection with {constants.ENDPOINT}: {_first_line(error)}",
                "check the network, then run the same command again to resume")  # fmt: skip
    again = "run the same command again: what has arrived is not sent or fetched twice"
    return _first_line(error), again


def _server_message(http_error: Any) -> str:
    """The Hub's own message, without the client's text around it."""
    return getattr(http_error, "server_message", None) or _first_line(http_error)


def _first_line(error: BaseException) -> str:
    """One line about the error that came first, without tokens."""
    from huggingface_hub import errors

    innermost = list(_chain(error))[-1]
    cause = _find(error, errors.HfHubHTTPError, errors.HTTPError) or innermost
    line = " ".join(str(cause).split()) or type(cause).__name__
    return without_token(line)[:MESSAGE_LENGTH]


def without_token(text: str) -> str:
    """Return the text with every token replaced by ***."""
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    secrets = [_token(), *(os.environ.get(name) for name in names)]
    for secret in secrets:
        if secret and secret.strip():
            text = text.replace(secret.strip(), "***")
    return re.sub(r"\bhf_\w{4,}", "***", text)
