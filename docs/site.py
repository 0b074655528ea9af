"""What `make docs` adds to the pages of this folder: those that lie at the top of the repository, with their links."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

TOP = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md",
         "CHANGELOG.md": "changelog.md"}  # fmt: skip
PICTURES = ("benchmarks/results/figures.svg",)
LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)#:]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(TOP / name).read_text()))
    for name in PICTURES:
        files.append(File.generated(config, name, abs_src_path=str(TOP / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links go to where a page is in the site. What is not in it, such as a source file, keeps its name alone."""
    here = page.file.src_uri
    top = next((name for name, its_page in PAGES.items() if its_page == here), None)
    folder = TOP if top else (TOP / "docs" / here).parent

    def moved(link: re.Match[str]) -> str:
        picture, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        found = (folder / target).resolve()
        name = found.relative_to(TOP).as_posix() if found.is_relative_to(TOP) else ""
        in_site = PAGES.get(name) or (name if name in PICTURES else name.removeprefix("docs/"))
        if files.get_file_from_path(in_site) is None:
            return text if found.is_file() else link[0]
        return f"{picture}[{text}]({os.path.relpath(in_site, os.path.dirname(here) or '.')}{anchor})"

    return LINK.sub(moved, markdown)
