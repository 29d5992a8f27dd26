"""A browser without a window, and the page in it over canned answers (`make test-page`).

The browser: the one that CHROMIUM names, or Debian's, or playwright's own.
"""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from support.serving.browser import Served
from support.serving.page_server import StandIn

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        # As root it has no sandbox, in containers for example.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture
def url(stand_in: StandIn) -> Iterator[str]:
    served = Served(stand_in.app)
    yield served.url
    served.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """Opened; at the end nothing may have failed in it, nor been asked of another host."""
    with browser.new_context() as context:
        page = context.new_page()
        asked: list[str] = []
        failures: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("console", lambda said: failures.append(said.text) if is_failure(said) else None)
        page.goto(url)
        page.locator("#model option").first.wait_for(state="attached")
        yield page
        assert [one for one in asked if not one.startswith(url)] == []
        assert failures == []


def is_failure(said: Any) -> bool:
    """A status of the server's is no failure of the page."""
    return said.type in ("error", "warning") and "Failed to load resource" not in said.text
