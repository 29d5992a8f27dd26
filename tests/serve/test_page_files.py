"""The page's files as they are served; what they do is tested in a browser (tests/page)."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.serving.live_server import LiveServer

from medusa_kit.serve import page

FOLDER = Path(page.__file__).parent
ROOT = FOLDER.parents[2]


@pytest.mark.parametrize("path", page.FILES)
def test_files_are_served_under_a_strict_policy(live: LiveServer, path: str) -> None:
    name, kind = page.FILES[path]
    with live.http() as http:
        for found in (http.get(path), http.head(path)):
            assert found.status_code == 200
            assert found.headers["content-type"] == kind
            assert found.headers["x-content-type-options"] == "nosniff"
            assert found.headers["referrer-policy"] == "no-referrer"
            policy = found.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
        assert http.get(path).content == (FOLDER / name).read_bytes()


@pytest.mark.parametrize("path", ["/page/", "/page/__init__.py", "/page/../app.py", "/page/x.js"])
def test_nothing_else_is_served(live: LiveServer, path: str) -> None:
    with live.http() as http:
        assert http.get(path).status_code == 404


class Document(HTMLParser):
    """What a document refers to, and what the policy forbids in it."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.links += [given[name] or "" for name in ("src", "href") if name in given]
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


def test_the_document_needs_nothing_but_these_files() -> None:
    document = Document()
    document.feed((FOLDER / "index.html").read_text())
    assert document.inline == []
    assert {f"/{link}" for link in document.links if not link.startswith("#")} <= set(page.FILES)
    for name in {name for name, _ in page.FILES.values()}:
        text = (FOLDER / name).read_text()
        hosts = set(re.findall(r"\w+://[^\s\"')]+", text))
        assert hosts <= {"http://www.w3.org/2000/svg"}, "the name of SVG, which is not fetched"
        assert "innerHTML" not in text
        assert len(text.splitlines()) < 400
        modules = re.findall(r'from "\./(\w+\.js)"', text)
        assert {f"/page/{module}" for module in modules} <= set(page.FILES)


def test_every_file_is_served_and_goes_into_the_package() -> None:
    there = {path.name for path in FOLDER.iterdir() if path.is_file()} - {"__init__.py"}
    assert there == {name for name, _ in page.FILES.values()}
    project = (ROOT / "pyproject.toml").read_text()
    (patterns,) = re.findall(r"^medusa_kit = (\[.*\])$", project, re.MULTILINE)  # package-data
    packed = {
        path for pattern in json.loads(patterns) for path in (ROOT / "medusa_kit").glob(pattern)
    }
    assert {FOLDER / name for name in there} <= packed


def test_trees_come_with_the_texts_of_their_tokens(live: LiveServer) -> None:
    """The page has no tokenizer."""
    asked = {
        "model": live.model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "temperature": 0,
        "medusa_kit": {"tree": True, "drafter": "medusa"},
    }
    with live.http() as http:
        found = http.post("/v1/chat/completions", json=asked).json()
    tree = found["choices"][0]["medusa_kit"]["tree"]
    decode = live.service.engine.base.tokenizer.decode
    assert len(tree["tokens"]) > 1
    assert tree["texts"] == [decode([token]) for token in tree["tokens"]]
    assert len(tree["parents"]) == len(tree["texts"])
