"""The documentation site: Sphinx reads the same Markdown pages that a code host shows, so a link works on both.

``make docs`` builds it into build/site. The repository's root is the source folder, for its README is the front page.
The navigation is docs/README.md: a caption for each of its sections, an entry for each page that the section links.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

INDEX = Path(__file__).resolve().with_name("README.md")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+\.md)\)")

project = "Hardpoint"
copyright = "the Hardpoint authors"  # Sphinx's name for it
extensions = ["myst_parser"]
myst_heading_anchors = 4
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "plugins/*/README.md"]
exclude_patterns = [".*", "build", "core", "examples", "plugin_api", "plugins/*/[!R]*", "tests"]
smartquotes = False  # they would turn --flag into a dash

html_theme = "furo"
html_title = "Hardpoint"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Append hidden toctrees, by the sections of docs/README.md, to the front page. Changes ``source`` in place."""
    if page != root_doc:
        return
    app.env.note_dependency(INDEX)  # another navigation makes the front page anew
    trees = [("Start", ["self", "docs/README"])]
    for section in re.split(r"^## ", INDEX.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        entries = [f"{title} <{os.path.normpath(f'docs/{link}')}>" for title, link in _LINK.findall(section)]
        trees.append((section.partition("\n")[0], entries))
    for caption, entries in trees:
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```", ""])


def make_front_page(app: Sphinx, error: Exception | None) -> None:
    """Copy README.html to index.html, which a web server looks for."""
    if error is None:
        shutil.copyfile(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", add_navigation)
    app.connect("build-finished", make_front_page)
