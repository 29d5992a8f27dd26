"""How long a busy server asks to wait: the header Retry-After, in seconds or as a date."""

import email.utils
import time

LONGEST_WAIT = 60.0  # seconds


def seconds_to_wait(retry_after: str | None, otherwise: float) -> float | None:
    """The seconds the header asks for; `otherwise` without a header that can be read.

    None where it asks for more than LONGEST_WAIT: whoever runs the command should decide then.
    """
    text = (retry_after or "").strip()
    if text.isascii() and text.isdigit():
        wait = float(text)
    else:
        try:
            wait = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except ValueError:
            wait = otherwise
    return max(0.0, wait) if wait <= LONGEST_WAIT else None
