"""The pages lead somewhere: what they link to, show or name is there. Nothing is fetched."""

import pkgutil
import re
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

import interdomain_jax

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("experiments/**/*.md"))]
FOLDERS = ("benchmarks", "configs", "docs", "examples", "experiments", "interdomain_jax", "pallas_kernels", "tests")
FILES = [path for folder in ("", *FOLDERS) for path in (ROOT / folder).glob("**/*" if folder else "*")]
WRITTEN = {"report.md"}
"""What programs write."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def tokens(page):
    """Blocks, and what is inside lines of text."""
    blocks = MarkdownIt().enable("table").parse(page.read_text())
    return [*blocks, *(token for block in blocks for token in block.children or ())]


def anchors(page):
    """Those that the hosting site and Sphinx give to headings."""
    found = tokens(page)
    headings = [text for block, text in pairwise(found) if block.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", text.content.lower()).replace(" ", "-") for text in headings}


@each_page
def test_links_and_pictures_are_there(page):
    targets = [target for token in tokens(page) if (target := token.attrs.get("href") or token.attrs.get("src"))]
    for target in targets:
        scheme, _, path, _, anchor = urlsplit(target)
        if not scheme:
            other = page.parent / unquote(path) if path else page
            assert other.exists(), target
            assert not anchor or anchor in anchors(other), target


@each_page
def test_files_that_are_named_are_there(page):
    """By their whole path or its end: a page on `interdomain_jax` may name `ops/fused.py`."""
    for name in {token.content for token in tokens(page) if token.type == "code_inline"} - WRITTEN:
        if re.fullmatch(rf"([\w.-]+/)*[\w.-]+\.(py|ipynb|md|toml)|({'|'.join(FOLDERS)})/[\w./-]*", name):
            assert any(f"{path}".endswith(f"/{name.rstrip('/')}") for path in FILES), name


def test_the_reference_has_what_is_public():
    reference = "".join(page.read_text() for page in ROOT.glob("docs/api/*.md"))
    modules = set(re.findall(r"automodule:: (\S+)", reference))
    for package in ("", ".ops", ".modules", ".inference", ".export"):
        package = pkgutil.resolve_name(f"interdomain_jax{package}")
        exported = [getattr(package, name) for name in package.__all__]
        assert {x.__module__ for x in exported if hasattr(x, "__module__")} <= modules


def test_the_page_on_the_package_has_its_names():
    listed = re.findall(r"^   ~(\S+)$", (ROOT / "docs/api/package.md").read_text(), re.MULTILINE)
    assert {name.rpartition(".")[2]: pkgutil.resolve_name(name) for name in listed} == {
        name: getattr(interdomain_jax, name) for name in interdomain_jax.__all__
    }
