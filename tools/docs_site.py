"""Hooks of mkdocs: the README is the home page, notebooks are run, and links to sources lead to pages that show them."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from jupyter_client import AsyncKernelManager
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbclient import NotebookClient
from nbconvert.exporters import MarkdownExporter

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([\w./-]+)(#[\w.-]+)?\)")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the home page, a page for each notebook, and one for each source that any page links to."""
    readme = re.sub(r"\]\((?!docs/|https?:|#)", "](../", (ROOT / "README.md").read_text(encoding="utf-8"))
    files.append(File.generated(config, "index.md", content=readme.replace("](docs/", "](")))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        _add_notebook(notebook, files, config)
    unread, shown = files.documentation_pages(), set()
    while unread:
        targets = {_target(page, link) for page in unread for link, _ in LINK.findall(page.content_string)}
        sources = {path for path in targets - shown if path is not None and not path.is_relative_to(DOCS)}
        unread = [File.generated(config, _page_of(source), content=_shown(source)) for source in sources]
        shown |= sources
        for page in unread:
            files.append(page)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to sources, such as ../parallel3d/zero/reducer.py#GradientReducer, to those pages."""

    def replaced(match: re.Match[str]) -> str:
        target, anchor = _target(page.file, match[1]), match[2] or ""
        if target is None:
            return match[0]
        if anchor and target.suffix == ".py":
            anchor = f"#__codelineno-0-{_line(target, anchor[1:])}"
        return f"]({os.path.relpath(_page_of(target), Path(page.file.src_uri).parent)}{anchor})"

    return LINK.sub(replaced, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Tell mkdocs, which checks links to anchors, of those at the lines of code."""
    page.present_anchor_ids |= set(re.findall(r'id="(__codelineno[\d-]+)"', html))


def _add_notebook(notebook: File, files: Files, config: MkDocsConfig) -> None:
    """Run a notebook in a directory of its own, and add its page and pictures. Raises CellExecutionError."""
    # Commands of the environment that builds the site, also where it is not activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    page = Path(notebook.src_uri)
    cells = nbformat.read(notebook.abs_src_path, as_version=4)
    with TemporaryDirectory() as folder:
        place, quiet = {"metadata": {"path": folder}}, ["--log-level=ERROR"]
        # Sockets in files: another process may take the ports that Jupyter has found before the kernel opens them.
        sockets = AsyncKernelManager(transport="ipc", connection_file=f"{folder}/kernel.json")
        NotebookClient(cells, sockets, resources=place, coalesce_streams=True, extra_arguments=quiet).execute()
    text, resources = MarkdownExporter().from_notebook_node(cells, {"unique_key": page.stem})
    text = text.replace("\n", f"\n\n[Download this notebook]({page.name})\n", 1)  # after its title
    files.append(File.generated(config, page.with_suffix(".md").as_posix(), content=text))
    for name, picture in resources["outputs"].items():
        files.append(File.generated(config, (page.parent / name).as_posix(), content=picture))


def _target(page: File, link: str) -> Path | None:
    """Return the file or directory of the repository to which a page links, None if there is none."""
    own = page.src_uri
    origin = ROOT / own.removeprefix("source/") if own.startswith("source/") else DOCS / own
    path = origin.parent.joinpath(link).resolve()
    return path if path.is_relative_to(ROOT) and path.exists() else None


def _page_of(path: Path) -> str:
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"source/{path.relative_to(ROOT).as_posix().removesuffix('.md')}.md"


def _shown(source: Path) -> str:
    """Return the Markdown that shows a source, or the names in a directory."""
    if source.suffix == ".md":
        return source.read_text(encoding="utf-8")
    if source.is_dir():
        text, language = "\n".join(sorted(path.name for path in source.iterdir())), "text"
    else:
        text, language = source.read_text(encoding="utf-8"), source.suffix.removeprefix(".")
    head = f"---\nsearch: {{exclude: true}}\nhide: [navigation, toc]\n---\n# {source.relative_to(ROOT)}\n"
    return f'{head}\n````{language} linenums="1"\n{text}\n````\n'


def _line(source: Path, symbol: str) -> int:
    """Return the number of the line that defines a symbol such as Class.method."""
    scope: ast.AST = ast.parse(source.read_text(encoding="utf-8"))
    for part in symbol.split("."):
        scope = next(node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == part)
    return scope.lineno
