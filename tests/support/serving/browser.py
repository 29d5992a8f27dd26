"""Using the page in a browser, as a person would."""

import socket
import threading
from typing import Any

import uvicorn


class Served:
    """An app on the loopback interface, in a thread."""

    def __init__(self, app: Any) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        config = uvicorn.Config(app, log_level="warning", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],))
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()


def send(page: Any, words: str) -> Any:
    """Send by keyboard; the answer's element."""
    page.get_by_label("Message", exact=True).fill(words)
    page.keyboard.press("Enter")
    return page.locator("article.answer").last


def ended(answer: Any) -> Any:
    button = answer.get_by_role("button", name="Compare with plain")
    button.and_(answer.page.locator(":enabled")).wait_for()
    return answer
