"""The page on screens of all sizes, with a finger, and while an answer comes."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.serving.browser import ended
from support.serving.page_server import StandIn

api = pytest.importorskip("playwright.sync_api", reason="`make test-page` installs playwright")
expect = api.expect
# A phone, held upright and on its side, with its keyboard shown, a tablet, a desktop.
SCREENS = [(320, 568), (390, 844), (390, 450), (768, 1024), (844, 390), (932, 430), (844, 190),
           (1280, 800)]  # fmt: skip
LARGE = "document.documentElement.style.fontSize = '200%'"
FROM_END = "e => e.scrollHeight - e.scrollTop - e.clientHeight"
TOP = "e => e.scrollTop"


@pytest.fixture
def phone(browser: Any, url: str) -> Iterator[Any]:
    with browser.new_context(
        viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True
    ) as context:
        page = context.new_page()
        page.goto(url)
        page.locator("#model option").first.wait_for(state="attached")
        yield page


def pane(page: Any) -> Any:
    return page.locator("#messages")


def wait_for_end(page: Any, wanted: bool = True) -> None:
    """Until the end of the messages is shown, or is not."""
    deadline = time.monotonic() + 30
    while (pane(page).evaluate(FROM_END) < 2) != wanted:
        assert time.monotonic() < deadline, pane(page).evaluate(FROM_END)
        page.wait_for_timeout(20)


def is_on_the_screen(page: Any, one: Any) -> bool:
    box, size = one.bounding_box(), page.viewport_size
    fits = box["x"] >= 0 and box["x"] + box["width"] <= size["width"] + 1
    return fits and box["y"] >= 0 and box["y"] + box["height"] <= size["height"] + 1


def resized(page: Any, width: int, height: int) -> None:
    page.set_viewport_size({"width": width, "height": height})


def sent(page: Any, words: str) -> Any:
    page.get_by_label("Message", exact=True).fill(words)
    page.get_by_role("button", name="Send").click()
    return page.locator("article.answer").last


@pytest.mark.parametrize("text", [100, 200])
@pytest.mark.parametrize("screen", SCREENS)
def test_the_message_box_is_on_the_screen(phone: Any, screen: tuple[int, int], text: int) -> None:
    """At first, and below a long conversation, whose end is shown, with room to read."""
    width, height = screen
    if text == 200 and height < 390:
        pytest.skip("no room for any page")
    if text == 200 and width > 1000:
        pytest.skip("a browser whose own letters are that large counts this screen as narrow")
    resized(phone, width, height)
    phone.reload()
    if text == 200:
        phone.evaluate(LARGE)
    expect(phone.get_by_text("Ask the model something.")).to_be_in_viewport()
    for words in ("at length", "code"):
        for one in (
            phone.get_by_label("Message", exact=True),
            phone.get_by_role("button", name="Send"),
        ):
            assert is_on_the_screen(phone, one), one.bounding_box()
            assert one.bounding_box()["width"] >= 60
        assert phone.evaluate("document.documentElement.scrollWidth") <= width
        room = pane(phone).bounding_box()["height"]
        assert room >= (min(200, height / 5 * 2) if text == 100 else 100)
        answer = ended(sent(phone, words))
        expect(answer.get_by_role("button", name="Compare with plain")).to_be_in_viewport()


def test_the_legend_makes_room_on_a_low_screen(phone: Any) -> None:
    legend = phone.locator(".legend")
    expect(legend).to_be_visible()
    for low in [(390, 450), (844, 390)]:
        resized(phone, *low)
        expect(legend).to_be_hidden()


@pytest.mark.parametrize("words", ["long", "wait"])
def test_a_double_tap_sends_and_stops_nothing(phone: Any, words: str) -> None:
    for size in [(390, 844), (844, 390)]:
        resized(phone, *size)
        phone.get_by_role("button", name="New conversation").click()
        phone.get_by_label("Message", exact=True).fill(words)
        box = phone.get_by_role("button", name="Send").bounding_box()
        for _ in range(3):
            phone.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        expect(phone.locator("article.answer")).to_have_attribute("aria-busy", "true")
        phone.get_by_role("button", name="Stop").tap()
        expect(phone.get_by_role("status")).to_contain_text("Stopped")
        if words == "wait":
            expect(phone.get_by_label("Message", exact=True)).to_have_value("wait")


def test_fingers_have_room_and_fields_are_not_enlarged(phone: Any) -> None:
    answer = ended(sent(phone, "size"))
    phone.locator("summary").get_by_text("Settings", exact=True).click()
    for one in phone.locator(
        ":is(button, select, summary, textarea, #settings input):visible"
    ).all():
        size = one.bounding_box()
        assert min(size["width"], size["height"]) >= 44, one.evaluate("e => e.outerHTML")
    for one in phone.locator(":is(input:not([type=checkbox]), select, textarea):visible").all():
        assert one.evaluate("e => parseFloat(getComputedStyle(e).fontSize)") >= 16
    answer.locator(".token.d2").first.tap()
    expect(phone.get_by_role("status")).to_contain_text("accepted at depth 2, drafted by medusa")


def test_enter_begins_a_line_where_a_finger_points(phone: Any, stand_in: StandIn) -> None:
    phone.get_by_label("Message", exact=True).fill("one")
    phone.keyboard.press("Enter")
    phone.keyboard.type("two")
    phone.get_by_role("button", name="Send").tap()
    ended(phone.locator("article.answer"))
    assert stand_in.requests[0]["messages"][0]["content"] == "one\ntwo"


def test_a_suggestion_opens_no_keyboard(phone: Any) -> None:
    phone.evaluate("document.activeElement.blur()")
    phone.get_by_role("list", name="To begin with").get_by_role("button").first.tap()
    ended(phone.locator("article.answer"))
    assert phone.evaluate("document.activeElement.id") != "prompt"


def test_settings_are_a_tap_away_and_back(phone: Any) -> None:
    phone.get_by_role("link", name="Settings").tap()
    expect(phone.get_by_role("complementary")).to_be_in_viewport()
    phone.get_by_role("link", name="Back to the conversation").tap()
    expect(phone.get_by_role("button", name="Send")).to_be_in_viewport()


def test_the_end_is_followed_until_the_reader_scrolls(page: Any) -> None:
    answer = sent(page, "long")
    expect(answer.locator(".token").nth(300)).to_be_attached()
    wait_for_end(page)
    resized(page, 800, 500)  # a keyboard, a turned phone
    wait_for_end(page)
    pane(page).hover()
    page.mouse.wheel(0, -60)
    wait_for_end(page, wanted=False)
    page.wait_for_timeout(100)  # until a smooth scroll has ended
    place = pane(page).evaluate(TOP)
    expect(answer.locator(".token").nth(answer.locator(".token").count() + 100)).to_be_attached()
    assert pane(page).evaluate(TOP) == place
    page.get_by_role("button", name="Stop").click()
    ended(answer)
    assert pane(page).evaluate(TOP) == place


def test_the_end_is_followed_again_from_the_end(page: Any) -> None:
    answer = sent(page, "long")
    expect(answer.locator(".token").nth(300)).to_be_attached()
    pane(page).hover()
    page.mouse.wheel(0, -60)
    wait_for_end(page, wanted=False)
    page.mouse.wheel(0, 100_000)
    wait_for_end(page)
    expect(answer.locator(".token").nth(answer.locator(".token").count() + 100)).to_be_attached()
    wait_for_end(page)
    page.keyboard.press("Escape")


def test_what_comes_back_is_shown_at_its_end(page: Any) -> None:
    """After a reload, the chosen conversation, not the newest one; and what was being written."""
    resized(page, 390, 450)
    ended(sent(page, "first"))
    ended(sent(page, "at length"))
    page.get_by_role("button", name="New conversation").click()
    ended(sent(page, "second"))
    page.get_by_label("Conversation", exact=True).select_option(label="first")
    wait_for_end(page)
    page.get_by_label("Message", exact=True).fill("a draft")
    page.reload()
    expect(page.locator("article")).to_have_count(4)
    wait_for_end(page)
    expect(page.get_by_label("Message", exact=True)).to_have_value("a draft")


def test_a_comparison_is_brought_onto_the_screen(phone: Any) -> None:
    resized(phone, 844, 390)
    answer = ended(sent(phone, "at length"))
    answer.get_by_role("button", name="Compare with plain").click()
    expect(answer.locator(".comparison .way").last).to_be_visible()
    expect(answer.locator(".comparison > p")).to_be_in_viewport()


def test_text_from_right_to_left(page: Any) -> None:
    ended(sent(page, "שלום עולם"))
    for one in (page.locator("article.user .text"), page.locator("article.answer .text")):
        assert one.get_attribute("dir") == "auto"
    assert (
        page.locator("article.user .text").evaluate("e => getComputedStyle(e).direction") == "rtl"
    )
