"""Links to files outside the site, such as LOG.md: to the repository, or, while it has no public
address, the file's name."""

import re
from pathlib import Path

from medusa_kit.installing import ADDRESS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ARCHIVES = {DOCS / "LOG.md", DOCS / "BENCHMARKS.md"}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")
NO_LEXER = re.compile(r"^```(mermaid|csv|refused)$", re.M)


def rewrite(app, page, source):
    folder = (DOCS / page).parent

    def link(match):
        text, name, anchor = match[1], match[2], match[3] or ""
        target = (folder / name).resolve()
        if target.is_relative_to(DOCS) and target not in ARCHIVES and target.suffix == ".md":
            return match[0]
        path = target.relative_to(ROOT)
        if ADDRESS is not None:
            return f"[{text}]({ADDRESS}/blob/main/{path}{anchor})"
        return text if text.strip("`") in (name, str(path)) else f"{text} (`{path}`)"

    source[0] = NO_LEXER.sub("```text", LINK.sub(link, source[0]))
