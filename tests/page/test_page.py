"""The page in a real browser without a window (`make test-page`), over canned answers.

A browser: playwright's own, or the one that CHROMIUM names, or Debian's.
"""

import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from support.page_server import KEY, STEPS, WORDS, StandIn

api = pytest.importorskip("playwright.sync_api", reason="`make test-page` installs playwright")
expect = api.expect

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
TOKENS = sum(map(len, STEPS))
# The contrast of two colours by WCAG; `ground` is the first ground behind an element.
CONTRAST = """
element => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => {
    const [x, y] = [light(a), light(b)];
    return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
  };
  const groundOf = one => {
    for (; one; one = one.parentElement) {
      const ground = rgb(getComputedStyle(one).backgroundColor);
      if (ground.length < 4 || ground[3] === 1) return ground;
    }
    return [255, 255, 255];
  };
  const style = getComputedStyle(element);
  return {
    text: contrast(rgb(style.color), groundOf(element)),
    line: contrast(rgb(style.textDecorationColor), groundOf(element.parentElement)),
    thickness: parseFloat(style.textDecorationThickness),
  };
}
"""
# What has no name for a screen reader, of what can be used.
NAMELESS = """
() => [...document.querySelectorAll("button, input, select, textarea, summary, a, [tabindex]")]
  .filter(one => {
    const label = one.labels?.length ? one.labels[0].textContent : "";
    const by = document.getElementById(one.getAttribute("aria-labelledby"))?.textContent ?? "";
    const own = /^(BUTTON|A|SUMMARY)$/.test(one.tagName) ? one.textContent : "";
    return !(label + by + own + (one.getAttribute("aria-label") ?? "")).trim();
  }).map(one => one.outerHTML)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        # As root it has no sandbox, in containers for example.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


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
        expect(page.locator("#model option")).not_to_have_count(0)
        yield page
        assert [one for one in asked if not one.startswith(url)] == []
        assert failures == []


def is_failure(said: Any) -> bool:
    """A status of the server's is no failure of the page."""
    return said.type in ("error", "warning") and "Failed to load resource" not in said.text


def send(page: Any, words: str) -> Any:
    """Send by keyboard; the answer's element."""
    page.get_by_label("Message", exact=True).fill(words)
    page.keyboard.press("Enter")
    return page.locator("article.answer").last


def ended(answer: Any) -> Any:
    expect(answer.get_by_role("button", name="Compare with plain")).to_be_enabled()
    return answer


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
    assert titles == "accepted at depth 3, guessed by suffix"
    expect(answer.locator(".figures-line")).to_contain_text("acceptance length 3.33")
    expect(answer.locator(".figures-line")).to_contain_text(f"{TOKENS} tokens")
    expect(answer).to_contain_text("The model’s own: 4. Accepted: 2 at depth 1, 2 at depth 2")
    (body,) = stand_in.requests
    assert body["messages"] == [{"role": "user", "content": "Tell me of the sea"}]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("tiny", 0, 256)
    assert body["medusa_kit"] == {"spans": True, "tree": True}
    assert body["stream_options"] == {"include_usage": True}


def test_figures_are_live_while_the_answer_comes(page: Any) -> None:
    answer = send(page, "long")
    expect(answer).to_have_attribute("aria-busy", "true")
    expect(answer.locator(".live")).to_contain_text(re.compile(r"[\d.]+ tokens/s · acceptance"))
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
    assert stand_in.hung_up == 1
    assert stand_in.requests[-1]["messages"][1]["content"].startswith(WORDS)


def test_a_message_stopped_before_its_answer_begins_can_be_changed(
    page: Any, stand_in: StandIn
) -> None:
    send(page, "wait")
    expect(page.locator(".live")).to_contain_text("Reading the prompt")
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


def test_everything_can_be_done_by_keyboard(page: Any, stand_in: StandIn) -> None:
    assert page.evaluate("document.activeElement.id") == "prompt", "one can type at once"
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    answer = ended(page.locator("article.answer"))
    page.locator(".skip").focus()
    seen = ["Skip to the message"]
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break  # once round
        name = page.evaluate("document.activeElement.id || document.activeElement.textContent")
        seen.append(name.strip())
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", f"{name} does not show that it has the focus"
    order = ["Skip to the message", "model", "conversations", "new", "Compare with plain",
             "tints", "prompt", "send", "tree", "The tree as text", "Settings"]  # fmt: skip
    assert [name for name in seen if name in order] == order
    answer.get_by_role("button", name="Compare with plain").focus()
    page.keyboard.press("Enter")
    expect(answer.locator(".comparison")).to_contain_text("identical")
    assert page.evaluate("document.activeElement.textContent") == "Compare with plain"


def test_comparing_answers_again_plainly(page: Any, stand_in: StandIn) -> None:
    answer = ended(send(page, "the same"))
    answer.get_by_role("button", name="Compare with plain").click()
    expect(answer.locator(".comparison")).to_contain_text("× the speed of plain decoding")
    expect(answer.locator(".comparison")).to_contain_text("The texts are identical.")
    expect(answer.locator(".way")).to_have_count(2)
    expect(answer.locator(".way").last).to_contain_text(re.compile(r"plain.*tokens/s"))
    drafted, plain = stand_in.requests
    assert plain["messages"] == drafted["messages"]
    assert plain["medusa_kit"]["drafter"] == "none"
    assert plain["temperature"] == 0
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
    assert [one["temperature"] for one in stand_in.requests] == [0]


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


def test_an_api_key_is_asked_for_and_sent(page: Any) -> None:
    send(page, "key")
    expect(page.get_by_role("alert")).to_contain_text("enter it under Settings")
    assert page.evaluate("document.activeElement.name") == "key"
    page.keyboard.type(KEY)
    page.get_by_role("button", name="Try again").click()
    ended(page.locator("article.answer"))
    assert page.evaluate("localStorage.length") == 0


def test_the_tree_of_the_last_step_is_drawn_and_told(page: Any) -> None:
    ended(send(page, "trees"))
    drawing = page.get_by_role("img", name="The last step verified 6 guesses, 3 accepted")
    expect(drawing).to_be_visible()
    assert drawing.locator("g.node").count() == 7
    accepted = [one.text_content() for one in drawing.locator("g.accepted text").all()]
    assert accepted == ["␣sea", "␣is", "␣blue", "⏎"]
    page.get_by_text("The tree as text").click()
    expect(page.locator("#tree-text")).to_contain_text("“␣was”, not accepted at depth 1")
    assert page.locator("#tree-text li").count() == 7
    assert page.locator("#tree-text b, #tree b").count() == 0


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


def test_a_screen_reader_hears_sentences_and_finds_names(page: Any) -> None:
    ended(send(page, "speak"))
    spoken = page.get_by_role("log")
    assert spoken.get_attribute("aria-live") == "polite"
    lines = [line.replace("\n", " ") for line in spoken.locator("p").all_inner_texts()]
    assert len(lines) == 2, "the words, and the end"
    assert lines[1].startswith("End of the answer.")
    assert page.locator("#messages[aria-live], #messages [aria-live]").count() == 0
    page.get_by_text("Settings", exact=True).click()
    assert page.evaluate(NAMELESS) == []
    for role in ("banner", "main", "complementary"):
        assert page.get_by_role(role).count() == 1
    levels = [int(one.evaluate("e => e.tagName[1]")) for one in page.get_by_role("heading").all()]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert page.locator("html").get_attribute("lang") == "en"
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_can_be_read(page: Any, scheme: str) -> None:
    """WCAG AA: text 4.5, lines that mean something 3; and depths differ by more than colour."""
    page.emulate_media(color_scheme=scheme)
    answer = ended(send(page, "colours"))
    send(page, "busy")
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_text("Settings", exact=True).click()
    thickness = []
    for depth in range(5):
        seen = answer.locator(f".token.d{depth}").first.evaluate(CONTRAST)
        assert seen["text"] >= 4.5
        assert seen["line"] >= 3 or depth == 0
        thickness.append(seen["thickness"])
    assert thickness == sorted(set(thickness)), thickness
    texts = "p, h1, h2, h3, dt, dd, label, summary, li, button:enabled, input, select, textarea"
    for one in page.locator(f":is({texts}):visible").all():
        assert one.evaluate(CONTRAST)["text"] >= 4.5, one.inner_html()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(250, 249, 246)") == (scheme == "light")


def test_tints_can_be_switched_off(page: Any) -> None:
    answer = ended(send(page, "plain looks"))
    page.get_by_label("Show tints").uncheck()
    line = "e => getComputedStyle(e).textDecorationLine"
    assert answer.locator(".token.d2").first.evaluate(line) == "none"


@pytest.mark.parametrize("width", [320, 1280])
def test_nothing_is_wider_than_the_screen(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    ended(send(page, "wide " + "w" * 400))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
