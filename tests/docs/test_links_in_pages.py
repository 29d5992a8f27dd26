"""Links of the pages lead to files and headings that exist."""

import re
from pathlib import Path

import pytest
from support.debug_model import ROOT

# A file with its folder, from one of these on; FOLDER/recipe.yaml stands for any.
NAMED = re.compile(r"(?<![\w./-])(?:[a-z_.][\w.-]*/)+[\w-]+\.(?:py|h|cpp|toml|yaml)\b")
FOLDERS = re.compile(r"[`(]((?:[a-z_]\w*/)+)[`),;]")
WITHIN = (ROOT, ROOT / "medusa_kit", ROOT / "tests")
# Files of other projects, and of a run.
OTHERS = {"examples/medusa/convert_checkpoint.py", "src/llama-vocab.cpp", "output_dir/recipe.yaml"}
HISTORY = ("LOG.md", "CHANGELOG.md")  # these name what there was
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def text_of(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text_of(page), re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-"))
    return found


def broken(page: Path) -> list[str]:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# One, two\n")
    page = tmp_path / "a.md"
    page.write_text("[a](b.md#one-two) [b](b.md#three) [c](c.md) [d](https://example.org)\n")
    assert broken(page) == ["b.md#three", "c.md"]


@pytest.mark.parametrize(
    "page",
    [*(page for page in PAGES if page.name not in HISTORY), ROOT / "Makefile", ROOT / ".ci/run"],
    ids=lambda page: page.name,
)
def test_files_that_are_named_are_there(page: Path) -> None:
    names = set(NAMED.findall(page.read_text()))
    assert [name for name in names if not any((top / name).exists() for top in WITHIN)] == []


def test_files_and_folders_that_the_code_names_are_there() -> None:
    """In comments and docstrings too, where no import would miss them."""
    wrong = set()
    for path in (ROOT / "medusa_kit").rglob("*"):
        if path.suffix in (".py", ".h", ".cpp"):
            text = path.read_text()
            names = {*NAMED.findall(text), *FOLDERS.findall(text)} - OTHERS
            tops = (*WITHIN, path.parent)
            wrong |= {name for name in names if not any((top / name).exists() for top in tops)}
    assert not wrong
