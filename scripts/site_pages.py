# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: pages in the repository's root become pages of the site; links to sources lead to the repository."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Pages in the repository's root, by their names in the site.
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\(([^)\s]+)\)")
IMAGE = re.compile(r'src="docs/')


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    for name, source in PAGES.items():
        text = IMAGE.sub('src="', (ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, name, content=in_site(text, "", config.repo_url)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page in docs/ or a folder below it."""
    del files
    if page.file.src_uri in PAGES:  # on_files mended it
        return markdown
    return in_site(markdown, posixpath.dirname(f"docs/{page.file.src_uri}"), config.repo_url)


def in_site(text: str, folder: str, repository: str | None) -> str:
    """A page's text with links for the site.

    Args:
        text: Markdown.
        folder: the folder of the repository in which the page is.
        repository: address of the repository on the web; None: links to sources are replaced by their text.
    """
    here = posixpath.relpath(folder, "docs") if folder else "."  # in the site, whose root is docs/

    def mended(link: re.Match[str]) -> str:
        image, said, target = link.groups()
        file, hash_, anchor = target.partition("#")
        if "://" in target or not file:
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, file))
        page = next((name for name, source in PAGES.items() if source == path), path.removeprefix("docs/"))
        if page != path or path.startswith("docs/"):
            return f"{image}[{said}]({posixpath.relpath(page, here)}{hash_}{anchor})"
        return f"[{said}]({repository}/blob/main/{path})" if repository else said

    return LINK.sub(mended, text)
