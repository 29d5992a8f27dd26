"""The page in a real browser: answers, conversations, comparisons, errors, the meter."""

import re
import time
from typing import Any

import pytest
from support.serving.browser import ended, send
from support.serving.page_server import STEPS, WORDS, StandIn

api = pytest.importorskip("playwright.sync_api", reason="`make test-page` installs playwright")
expect = api.expect
TOKENS = sum(map(len, STEPS))


def test_an_answer_streams_in_and_its_tokens_are_tinted_by_depth(
    page: Any, stand_in: StandIn
) -> None:
    answer = ended(send(page, "Tell me of the sea"))
    assert answer.locator(".text").text_content() == WORDS
    assert page.locator(".message i").count() == 0, "text of a model is no HTML"
    classes = [one.get_attribute("class") for one in answer.locator(".token").all()]
    depths = [depth for step in STEPS for _, depth, _ in step]
    assert classes == [f"token d{depth}" for depth in depths]
    titles = answer.locator(".token.d3").first.get_attribute("title")
    assert titles == "accepted at depth 3, drafted by suffix"
    drafted = sum(depth > 0 for depth in depths)
    line = re.compile(rf"^{TOKENS} tokens in [\d.]+ s; {drafted} of them drafted ahead\.$")
    expect(answer.locator(".figures-line")).to_have_text(line)
    expect(answer.get_by_text("acceptance length 3.33")).to_be_hidden()
    answer.get_by_text("Details", exact=True).click()
    expect(answer.get_by_text("acceptance length 3.33")).to_be_visible()
    expect(answer).to_contain_text("The model’s own: 4. Accepted: 2 at depth 1, 2 at depth 2")
    expect(answer).to_contain_text("Steps by source: medusa 90%, none 10%.")
    (body,) = stand_in.requests
    assert body["messages"] == [{"role": "user", "content": "Tell me of the sea"}]
    assert body["model"] == "tiny"
    assert not {"temperature", "max_tokens"} & body.keys(), "the server decides what is not set"
    assert body["medusa_kit"] == {"spans": True, "tree": True}
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("again", [False, True])
def test_code_between_fences_is_shown_as_a_block(page: Any, again: bool) -> None:
    """While it comes, and read back after a reload."""
    answer = ended(send(page, "code"))
    if again:
        page.reload()
        answer = page.locator("article.answer").last
    blocks = answer.locator("pre.code")
    assert [one.text_content() for one in blocks.all()] == ["a = `b`\n\nprint(a)\n", "<b>\n```\n"]
    assert blocks.first.get_attribute("aria-label") == "Code, python"
    said = answer.locator(".text").evaluate(
        "e => [...e.childNodes].filter(n => n.nodeName !== 'PRE').map(n => n.textContent).join('')"
    )
    assert said == "So:\nDone.\n"
    assert blocks.first.locator(".token.d1").first.text_content() == "a = `b`"


def test_no_text_behind_a_fence_is_lost(page: Any) -> None:
    """But a language's name, which readers of the screen hear."""
    text = ended(send(page, "fences")).locator(".text")
    blocks = [one.text_content() for one in text.locator("pre.code").all()]
    assert blocks == ["The answer is 5.\nNot ** bold **\n", "x"]
    labels = [one.get_attribute("aria-label") for one in text.locator("pre.code").all()]
    assert labels == ["Code", "Code, c++"]
    assert text.locator("pre .token.d1").first.text_content() == "is 5."
    assert "So ** 5 **, 6.\n" in text.text_content()
    assert [one.text_content() for one in text.locator("strong").all()] == ["6"]


def test_marks_of_a_line_are_shown_as_what_they_mean(page: Any) -> None:
    """And the tints stay. Nothing else of what a model writes is HTML."""
    text = ended(send(page, "marks")).locator(".text")
    assert text.locator(".heading").text_content() == "Heading"
    assert [one.text_content() for one in text.locator("strong").all()] == ["item"]
    assert [one.text_content() for one in text.locator("code").all()] == ["a**b"]
    assert text.locator(".row").text_content() == "| a | **b** |"
    lines = ["Heading", "• an item of a**b <b>x</b>", "| a | **b** |", "2 ** 3 ** `4"]
    assert text.text_content() == "\n".join(lines)
    assert text.locator("strong .token.d2").text_content() == "ite"
    assert text.locator("code .token.d1").text_content() == "a*"
    assert text.locator("b, .row strong").count() == 0


def test_figures_are_live_while_the_answer_comes(page: Any) -> None:
    answer = send(page, "long")
    expect(answer).to_have_attribute("aria-busy", "true")
    expect(answer.locator(".live")).to_contain_text(re.compile(r"\d+ tokens in [\d.]+ s"))
    page.keyboard.press("Escape")
    ended(answer)


def test_a_conversation_goes_on_and_outlives_a_reload(page: Any, stand_in: StandIn) -> None:
    ended(send(page, "one"))
    page.keyboard.type("two")  # the focus has stayed
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    page.keyboard.press("Enter")
    ended(page.locator("article.answer").last)
    said = [(one["role"], one["content"]) for one in stand_in.requests[-1]["messages"]]
    assert said == [("user", "one"), ("assistant", WORDS), ("user", "two\nlines")]
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("article")).to_have_count(0)
    ended(send(page, "three"))
    assert len(stand_in.requests[-1]["messages"]) == 1
    page.reload()
    expect(page.locator("article")).to_have_count(2)
    page.get_by_label("Conversation", exact=True).select_option(label="one")
    expect(page.locator("article")).to_have_count(4)
    assert page.locator("article.answer .text").last.text_content() == WORDS


def test_escape_stops_and_the_server_gets_to_know(page: Any, stand_in: StandIn) -> None:
    answer = send(page, "long")
    expect(answer.locator(".token").nth(20)).to_be_attached()
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    page.keyboard.press("Escape")
    ended(answer)
    expect(answer).to_contain_text("You stopped it.")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert page.evaluate("document.activeElement.id") == "prompt"
    ended(send(page, "go on"))
    deadline = time.monotonic() + 30
    while not stand_in.hung_up and time.monotonic() < deadline:
        page.wait_for_timeout(20)
    assert stand_in.hung_up == 1
    assert stand_in.requests[-1]["messages"][1]["content"].startswith(WORDS)


def test_a_message_stopped_before_its_answer_begins_can_be_changed(
    page: Any, stand_in: StandIn
) -> None:
    send(page, "wait")
    expect(page.locator(".live")).to_contain_text("Prefilling the prompt")
    page.keyboard.press("Escape")
    expect(page.locator("article")).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_have_value("wait")
    page.keyboard.type(", go on")
    page.keyboard.press("Enter")
    ended(page.locator("article.answer"))
    assert [one["content"] for one in stand_in.requests[-1]["messages"]] == ["wait, go on"]


def test_an_opening_is_sent_by_its_button(page: Any, stand_in: StandIn) -> None:
    opening = page.get_by_role("list", name="To begin with").get_by_role("button").first
    words = opening.text_content()
    opening.click()
    ended(page.locator("article.answer"))
    assert stand_in.requests[0]["messages"][0]["content"] == words


def test_comparing_answers_again_plainly(page: Any, stand_in: StandIn) -> None:
    answer = ended(send(page, "at length"))
    answer.get_by_role("button", name="Compare with plain").click()
    expect(answer.locator(".comparison .token").nth(TOKENS)).to_be_visible()  # drawn, as the first
    expect(answer.locator(".comparison")).to_contain_text("× the speed of plain decoding")
    expect(answer.locator(".comparison")).to_contain_text("The texts are identical.")
    expect(answer.locator(".comparison .token")).to_have_count(0)
    expect(answer.locator(".way")).to_have_count(2)
    expect(answer.locator(".way").last).to_contain_text(re.compile(r"plain.*tokens/s"))
    drafted, plain = stand_in.requests
    assert plain["messages"] == drafted["messages"]
    assert plain["medusa_kit"]["drafter"] == "none"
    assert plain["temperature"] == 0
    answer = ended(send(page, "the same"))
    answer.get_by_role("button", name="Compare with plain").click()
    expect(answer.locator(".comparison")).to_contain_text("The texts are identical.")
    expect(answer.locator(".way").first).to_contain_text("too short to time")
    expect(answer.locator(".comparison")).not_to_contain_text("the speed of plain decoding")
    answer = ended(send(page, "loop"))
    answer.get_by_role("button", name="Compare with plain").click()
    expect(answer.locator(".comparison")).to_contain_text("The answer ends in a loop")
    expect(answer.locator(".way").first).to_contain_text("not timed")
    answer = ended(send(page, "differ"))
    answer.get_by_role("button", name="Compare with plain").click()
    at = len(WORDS.removesuffix(".")) + 1
    expect(answer.locator(".comparison")).to_contain_text(f"differ from character {at} on")


def test_sampled_answers_are_compared_at_temperature_0(page: Any, stand_in: StandIn) -> None:
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Seed").fill("3")
    page.get_by_label("System message").fill("Be brief.")
    answer = ended(send(page, "draw"))
    sent = stand_in.requests[-1]
    assert (sent["temperature"], sent["seed"]) == (0.7, 3)
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    answer.get_by_role("button", name="Compare with plain").click()
    expect(answer.locator(".comparison")).to_contain_text("Both ways answered again")
    drafted, plain = stand_in.requests[1:]
    assert [one["temperature"] for one in (drafted, plain)] == [0, 0]
    assert [one["medusa_kit"].get("drafter") for one in (drafted, plain)] == [None, "none"]


def test_settings_out_of_range_are_not_sent(page: Any, stand_in: StandIn) -> None:
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Temperature").fill("9")
    page.get_by_label("Message", exact=True).fill("hot")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.name") == "temperature"
    page.get_by_role("button", name="Back to the defaults").click()
    ended(send(page, "hot"))
    assert ["temperature" in one for one in stand_in.requests] == [False]


@pytest.mark.parametrize("usual", [0.6, None])
def test_what_the_model_samples_by_itself_is_compared_at_temperature_0(
    browser: Any, stand_in: StandIn, url: str, usual: float | None
) -> None:
    """Nor is it known to be greedy where the server does not say."""
    stand_in.usual = usual
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(url)
        page.locator("#model option").first.wait_for(state="attached")
        answer = ended(send(page, "draw"))
        answer.get_by_role("button", name="Compare with plain").click()
        expect(answer.locator(".comparison")).to_contain_text("Both ways answered again")
    assert [one.get("temperature") for one in stand_in.requests] == [None, 0, 0]


def test_nothing_is_claimed_before_the_first_answer(page: Any, url: str) -> None:
    """And the page says where the API is."""
    expect(page.locator("#api")).to_have_text(f"{url}v1")
    said = page.locator("#welcome").text_content()
    assert not re.search("fast|speed", said)


def test_the_meter_is_read_while_the_page_is_visible(page: Any, stand_in: StandIn) -> None:
    expect(page.locator("#batch")).to_contain_text("2 of 8")
    expect(page.locator("#batch")).to_contain_text("312")
    expect(page.locator(".cell.running")).to_have_count(2)
    with page.expect_response("**/v1/batch"):  # it goes on
        pass
    page.evaluate(
        "Object.defineProperty(document, 'visibilityState', {get: () => 'hidden'});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait_for_timeout(200)  # for one that was on its way
    before = stand_in.batches
    page.wait_for_timeout(1500)
    assert stand_in.batches == before
