"""The page at `/`: a chat in the browser. Its files stand beside this one and need no build."""

from collections.abc import Callable
from importlib import resources

from fastapi import APIRouter, Response

MODULES = (
    "answers", "app", "comparing", "conversations", "drawn", "elements", "following", "kept",
    "marks", "messages", "meter", "settings", "tree", "troubles", "work", "written",
)  # fmt: skip
# By the path that it is served at; index.html names the others relative to itself, so that the
# page also works below a prefix of a proxy.
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/page/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in MODULES},
}
# Text of a model or of another's message can then neither run nor load nor send anything.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a new version of the kit shows its own page
}


def _answer(name: str, kind: str) -> Callable[[], Response]:
    content = resources.files(__name__).joinpath(name).read_bytes()
    return lambda: Response(content, media_type=kind, headers=HEADERS)


router = APIRouter()  # without an API key, since the page is where it is entered
for _path, (_name, _kind) in FILES.items():
    router.add_api_route(
        _path, _answer(_name, _kind), methods=["GET", "HEAD"], include_in_schema=False
    )
