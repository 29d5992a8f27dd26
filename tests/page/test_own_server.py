"""The page over the kit's own server."""

from pathlib import Path
from typing import Any

import pytest
from support.serving.browser import ended, send
from support.serving.live_server import live_server
from support.small_engines import build_engine, lively_chat_base, random_heads

from medusa_kit.heads import save_heads

api = pytest.importorskip("playwright.sync_api", reason="`make test-page` installs playwright")
expect = api.expect


def test_the_menu_offers_heads(browser: Any, tmp_path: Path) -> None:
    """With what is known of them, and the answer is drafted with those that were chosen."""
    base = lively_chat_base()
    save_heads(random_heads(base, 4, kind="hydra"), tmp_path / "many")
    with (
        live_server(build_engine(base), heads_dir=str(tmp_path)) as live,
        browser.new_context() as context,
    ):
        page = context.new_page()
        page.goto(live.url)
        menu = page.get_by_label("Model", exact=True)
        expect(menu.locator("option")).to_have_text(["lively", "lively:many (hydra, 4 heads)"])
        menu.select_option("lively:many")
        page.get_by_text("Settings", exact=True).click()
        page.get_by_label("Longest answer").fill("8")
        ended(send(page, "Hello there"))
        expect(page.locator("article.answer")).to_contain_text("lively:many")
        with live.http() as http:
            assert 'heads="many"} 1.0' in http.get("/metrics").text


def test_the_kits_own_server_answers_the_page(browser: Any) -> None:
    """A tiny model behind the real routes: an answer in tints, its tree, the comparison."""
    base = lively_chat_base()
    engine = build_engine(base, heads=random_heads(base))
    with live_server(engine, max_rows=4) as live, browser.new_context() as context:
        page = context.new_page()
        page.goto(live.url)
        expect(page.get_by_label("Model", exact=True)).to_have_value(live.model)
        expect(page.locator("#batch")).to_contain_text("0 of 4")
        page.get_by_text("Settings", exact=True).click()
        page.get_by_label("Longest answer").fill("40")
        page.get_by_label("Drafter").select_option("medusa")
        answer = ended(send(page, "Hello there"))
        expect(answer.locator(".figures-line")).to_contain_text("40 tokens in")
        expect(answer.locator("details")).to_contain_text("acceptance length")
        expect(page.get_by_role("img", name="The last step verified")).to_be_visible()
        assert "#" not in page.locator("#tree g.node text").first.text_content()
        answer.get_by_role("button", name="Compare with plain").click()
        expect(answer.locator(".comparison")).to_contain_text("The texts are identical.")
        send(page, "too long " * 1000)
        expect(page.get_by_role("alert")).to_contain_text("The prompt is too long")
