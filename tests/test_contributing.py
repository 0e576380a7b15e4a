"""The files for contributors hold what they must, and agree with each other."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from interdomain_jax.version import __version__

ROOT = Path(__file__).parents[1]
FORMS = [path for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml") if path.stem != "config"]


def load(path):
    return yaml.safe_load((ROOT / path).read_text())


def test_a_commit_is_checked_by_what_lint_runs():
    recipe = subprocess.run(
        ["make", "--dry-run", "--old-file=.venv/dev", "VENV=.venv", "lint"], cwd=ROOT, capture_output=True, text=True
    )
    (repository,) = load(".pre-commit-config.yaml")["repos"]
    checks = {hook["entry"].replace(" --force-exclude", "") for hook in repository["hooks"]}
    lint = {re.sub(r"( --check)?( \.)?$", "", line) for line in recipe.stdout.splitlines() if ".venv/bin" in line}
    assert len(lint) > 3
    assert lint <= checks


def test_the_citation_is_of_this_version_and_readmes_paper():
    citation = load("CITATION.cff")
    assert citation["version"] == __version__
    paper = citation["preferred-citation"]
    assert paper["url"] in (ROOT / "README.md").read_text()
    assert paper["identifiers"][0]["value"].removeprefix("arXiv:") in paper["url"]


def test_the_changelog_has_this_version():
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert __version__ in (ROOT / "CHANGELOG.md").read_text()


def test_contributing_names_what_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make ([a-z-]+)`", text))
    assert len(targets) > 5
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    paths = {path for path in re.findall(r"`([\w./]+(?:/|\.\w+))`", text) if "/" in path}
    assert len(paths) > 10
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_have_the_fields_of_forms(path):
    form = load(path)
    assert {"name", "description", "body"} <= {*form}
    for field in form["body"]:
        assert field["type"] in ("textarea", "input")
        assert field["attributes"]["label"]
    identifiers = [field["id"] for field in form["body"]]
    assert len({*identifiers}) == len(identifiers)
