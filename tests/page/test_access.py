"""The page by keyboard, by ear, in light and dark, on small screens."""

from itertools import pairwise
from typing import Any

import pytest
from support.serving.browser import ended, send
from support.serving.page_server import StandIn

api = pytest.importorskip("playwright.sync_api", reason="`make test-page` installs playwright")
expect = api.expect
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
    order = ["Skip to the message", "model", "conversations", "new", "Details",
             "Compare with plain", "tints", "prompt", "send", "tree", "The tree as text",
             "Settings"]  # fmt: skip
    assert [name for name in seen if name in order] == order
    answer.get_by_role("button", name="Compare with plain").focus()
    page.keyboard.press("Enter")
    expect(answer.locator(".comparison")).to_contain_text("identical")
    assert page.evaluate("document.activeElement.textContent") == "Compare with plain"


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


def test_the_tree_of_the_last_step_is_drawn_and_told(page: Any) -> None:
    ended(send(page, "trees"))
    drawing = page.get_by_role("img", name="The last step verified 6 draft tokens, 3 accepted")
    expect(drawing).to_be_visible()
    assert drawing.locator("g.node").count() == 7
    accepted = [one.text_content() for one in drawing.locator("g.accepted text").all()]
    assert accepted == ["␣sea", "␣is", "␣blue", "⏎"]
    page.get_by_text("The tree as text").click()
    expect(page.locator("#tree-text")).to_contain_text("“␣was”, not accepted at depth 1")
    assert page.locator("#tree-text li").count() == 7
    assert page.locator("#tree-text b, #tree b").count() == 0
