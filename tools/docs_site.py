"""Hooks of mkdocs: the README is the home page, and links to sources lead to pages that show them."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([\w./-]+)(?:#([\w.]+))?\)")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the home page, and a page for each source that any page links to."""
    readme = re.sub(r"\]\((?!docs/|https?:|#)", "](../", (ROOT / "README.md").read_text(encoding="utf-8"))
    files.append(File.generated(config, "index.md", content=readme.replace("](docs/", "](")))
    pages = files.documentation_pages()
    sources = {_source(page, link) for page in pages for link, _ in LINK.findall(page.content_string)}
    for source in filter(None, sources):
        files.append(File.generated(config, _page_of(source), content=_shown(source)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to sources, such as ../parallel3d/zero/reducer.py#GradientReducer, to those pages."""

    def replaced(match: re.Match[str]) -> str:
        source = _source(page.file, match[1])
        if source is None:
            return match[0]
        line = f"#__codelineno-0-{_line(source, match[2])}" if match[2] else ""
        return f"]({os.path.relpath(_page_of(source), Path(page.file.src_uri).parent)}{line})"

    return LINK.sub(replaced, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Tell mkdocs, which checks links to anchors, of those at the lines of code."""
    page.present_anchor_ids |= set(re.findall(r'id="(__codelineno[\d-]+)"', html))


def _source(page: File, link: str) -> Path | None:
    """Return the file or directory to which a page links, None if it is not outside of docs/."""
    path = (ROOT / "docs" / page.src_uri).parent.joinpath(link).resolve()
    outside = path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs")
    return path if outside and path.exists() else None


def _page_of(source: Path) -> str:
    return f"source/{source.relative_to(ROOT).as_posix().removesuffix('.md')}.md"


def _shown(source: Path) -> str:
    """Return the Markdown that shows a source, or the names in a directory."""
    if source.suffix == ".md":
        return source.read_text(encoding="utf-8")
    if source.is_dir():
        text, language = "\n".join(sorted(path.name for path in source.iterdir())), "text"
    else:
        text, language = source.read_text(encoding="utf-8"), source.suffix.removeprefix(".")
    head = f"---\nsearch: {{exclude: true}}\n---\n# {source.relative_to(ROOT)}\n"
    return f'{head}\n````{language} linenums="1"\n{text}\n````\n'


def _line(source: Path, symbol: str) -> int:
    """Return the number of the line that defines a symbol such as Class.method."""
    scope: ast.AST = ast.parse(source.read_text(encoding="utf-8"))
    for part in symbol.split("."):
        scope = next(node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == part)
    return scope.lineno
