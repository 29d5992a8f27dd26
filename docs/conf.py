"""The docs as a site (`make docs`): Sphinx with MyST, in a copy of this folder.

A warning is an error. LOG.md and BENCHMARKS.md are dated archives and stay outside, as does what
lies above docs/.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "site"))

import outside  # noqa: E402
import reference  # noqa: E402

from medusa_kit.version import __version__  # noqa: E402

project, release = "medusa-kit", __version__
copyright, author = "the authors of medusa-kit", "the authors of medusa-kit"
extensions = ["myst_parser", "sphinx_external_toc", "sphinx.ext.autodoc", "sphinx_copybutton"]
external_toc_path = "site/toc.yml"
exclude_patterns = ["LOG.md", "BENCHMARKS.md", "site", "_build"]
myst_heading_anchors = 4
nitpicky = True
autodoc_typehints = "none"  # the signature would be all types
copybutton_prompt_text = "$ "
html_theme = "furo"
html_title = f"{project} {release}"


def setup(app):
    app.connect("config-inited", lambda *_: reference.write(HERE / "reference"))
    app.connect("source-read", outside.rewrite)
