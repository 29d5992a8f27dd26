"""What goes wrong is told, nothing that was written is lost, and it can be tried again."""

import re
from typing import Any

import pytest
from support.serving.browser import Served, ended, send
from support.serving.page_server import KEY, WORDS, StandIn

api = pytest.importorskip("playwright.sync_api", reason="`make test-page` installs playwright")
expect = api.expect


@pytest.mark.parametrize(
    ("said", "words"),
    [("busy", "The server is busy. The queue is full. Try again in 7 seconds."),
     ("broken", "The device is out of memory."),
     ("cut", "The answer broke off")],
)  # fmt: skip
def test_errors_are_shown_in_words(page: Any, stand_in: StandIn, said: str, words: str) -> None:
    send(page, said)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text(words)
    asked = len(stand_in.requests)
    alert.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_contain_text(words)
    assert len(stand_in.requests) == asked + 1
    assert stand_in.requests[-1]["messages"] == [{"role": "user", "content": said}]


def test_a_server_that_is_gone_is_told(browser: Any, stand_in: StandIn) -> None:
    served = Served(stand_in.app)
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(served.url)
        expect(page.locator("#model option")).not_to_have_count(0)
        served.close()
        send(page, "are you there?")
        expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached.")


def test_an_answer_that_broke_off_stays_until_another_begins(page: Any, stand_in: StandIn) -> None:
    ended(send(page, "once"))
    articles = page.locator("article.answer")
    expect(articles.first).to_contain_text("It broke off.")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_text("Prefilling the prompt")).to_be_visible()
    expect(articles.first).to_contain_text("The")
    page.keyboard.press("Escape")  # before it begins: what there was stays, and can be tried again
    expect(articles).to_have_count(1)
    expect(articles.first).to_contain_text("It broke off.")
    page.get_by_role("button", name="Try again").click()
    stand_in.released.set()
    expect(articles.last.locator(".figures-line:not(.live)")).to_be_visible()
    expect(articles).to_have_count(1)
    assert articles.locator(".text").text_content() == WORDS
    expect(page.get_by_role("alert")).to_have_count(0)
    said = [[one["content"] for one in body["messages"]] for body in stand_in.requests]
    assert said == [["once"]] * 3


def test_messages_without_an_answer_stay(page: Any, stand_in: StandIn) -> None:
    """On the page, over a reload; a later message passes them over."""
    send(page, "busy")
    expect(page.get_by_role("alert")).to_be_visible()
    page.reload()
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("The server is busy.")
    expect(alert.get_by_role("button", name="Try again")).to_be_visible()
    ended(send(page, "something else"))
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator("article.user")).to_have_count(2)
    expect(page.locator("article.user").first).to_contain_text("This had no answer")
    said = [one["content"] for one in stand_in.requests[-1]["messages"]]
    assert said == ["something else"]


def test_a_message_that_is_refused_goes_back_into_its_box(page: Any) -> None:
    send(page, "large")
    alert = page.get_by_role("alert")
    words = alert.locator("p").inner_text()
    assert words == "The prompt is too long: 9 tokens.\nhint: shorten the prompt."
    expect(alert.get_by_role("button", name="Try again")).to_have_count(0)
    box = page.get_by_label("Message", exact=True)
    box.fill("Meanwhile")
    alert.get_by_role("button", name="Edit the message").click()
    expect(box).to_have_value("large\n\nMeanwhile")
    expect(box).to_be_focused()
    expect(page.locator("article")).to_have_count(0)


def test_a_page_closed_while_it_waits_keeps_the_message(page: Any) -> None:
    send(page, "wait")
    expect(page.get_by_text("Prefilling the prompt")).to_be_visible()
    page.get_by_label("Message", exact=True).fill("a draft")
    page.reload()
    expect(page.locator("article.user")).to_contain_text("wait")
    expect(page.get_by_role("alert").get_by_role("button")).to_have_count(2)
    expect(page.get_by_label("Message", exact=True)).to_have_value("a draft")


def test_an_api_key_is_asked_for_in_one_box(browser: Any, stand_in: StandIn, url: str) -> None:
    """On the screen, with the field in it; it goes when the key is right."""
    stand_in.locked = True
    with browser.new_context(viewport={"width": 390, "height": 844}) as context:
        page = context.new_page()
        page.goto(url)
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("The server asks for an API key.")
        expect(alert).not_to_contain_text("header")
        expect(alert).to_be_in_viewport(ratio=1)
        assert page.evaluate("scrollY") == 0
        expect(alert.get_by_label("API key")).to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(alert).to_have_text(re.compile("^The server does not accept this API key."))
        send(page, "Hello")
        expect(page.locator("article.user")).to_have_count(1)
        expect(alert.get_by_label("API key")).to_be_focused()
        page.keyboard.type(KEY)
        alert.get_by_role("button", name="Use this key").click()
        ended(page.locator("article.answer"))
        expect(alert).to_have_count(0)
        page.reload()
        expect(page.locator("#model option")).to_have_count(2)
        expect(alert).to_have_count(0)
        assert page.evaluate("localStorage.length") == 0


def test_a_key_that_one_request_needs_is_asked_for(page: Any) -> None:
    send(page, "key")
    field = page.get_by_role("alert").get_by_label("API key")
    expect(field).to_be_focused()
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    ended(page.locator("article.answer"))
    expect(page.get_by_role("alert")).to_have_count(0)
