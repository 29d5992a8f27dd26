"""A picture of the page of a running `medusa-kit serve`, with an answer of its model.

medusa-kit serve &
make test-page        # installs playwright
export PYTHONPATH=build/browser
python benchmarks/page_picture.py http://127.0.0.1:8000 docs/images/page.png
"""

import argparse
import os
import shutil

from playwright.sync_api import expect, sync_playwright

QUESTION = "What is the capital of France, and what is it known for?"
SIZE = {"width": 1200, "height": 800}
PATIENCE = 120_000  # milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("output")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--drafter", default="", help="as the page's settings have it")
    parser.add_argument("--compare", action="store_true", help="with plain decoding, below it")
    given = parser.parse_args()
    browser_path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # as root it has none
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=flags)
        page = browser.new_page(color_scheme=given.scheme, viewport=SIZE)
        page.goto(given.url)
        page.locator("#model option").first.wait_for(state="attached")
        page.get_by_text("Settings", exact=True).click()
        page.get_by_label("Longest answer").fill(str(given.tokens))
        page.get_by_label("Drafter").select_option(given.drafter)
        page.get_by_text("Settings", exact=True).click()
        page.get_by_label("Message", exact=True).fill(given.question)
        page.keyboard.press("Enter")
        compare = page.get_by_role("button", name="Compare with plain")
        expect(compare).to_be_enabled(timeout=PATIENCE)
        if given.compare:
            compare.click()
            expect(compare).to_be_enabled(timeout=PATIENCE)
        page.locator("#prompt").focus()
        messages = page.locator("#messages")
        messages.evaluate("element => { element.scrollTop = element.scrollHeight; }")
        page.wait_for_timeout(1500)  # for the meter
        page.screenshot(path=given.output)
        browser.close()


if __name__ == "__main__":
    main()
