"""The documents name what exists: functions, metrics, fields, commands, files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from shoal.configs.app import RequestLimits
from shoal.deployments.cli.main import COMMANDS
from shoal.deployments.metrics import TABLE
from shoal.deployments.protocol.chat import ChatCompletionRequest
from shoal.deployments.protocol.completions import CompletionRequest

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
FOLDERS = ("configs", "kernels", "kvcache", "model_shards", "guardrails", "deployments")


def quoted(path: Path) -> set[str]:
    """What stands in `backticks`."""
    return set(re.findall(r"`([^`\n]+)`", path.read_text()))


def defined_names() -> set[str]:
    """Classes, functions and Class.method of the product."""
    names = set()
    for folder in FOLDERS:
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names.add(node.name)
                if isinstance(node, ast.ClassDef):
                    members = [m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)]
                    names |= {f"{node.name}.{member.name}" for member in members}
    return names


def test_the_architecture_names_classes_and_methods_that_exist() -> None:
    names = {name for name in quoted(REPOSITORY / "docs/architecture.md") if re.fullmatch(r"[A-Z]\w+(\.\w+)?", name)}
    assert len(names) > 30
    assert names - defined_names() == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_links_exist(document: Path) -> None:
    text = document.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []
    files = [name for name in quoted(document) if re.fullmatch(r"(?:\w[\w.-]*/)+[\w.-]+\.(?:py|yaml)", name)]
    assert [name for name in files if not (REPOSITORY / name).exists()] == []


def test_every_metric_is_documented_and_no_other() -> None:
    text = (REPOSITORY / "docs/operations.md").read_text()
    assert set(re.findall(r"\bshoal_\w+", text)) == {metric.name for metric in TABLE}


def test_every_field_of_a_request_is_documented() -> None:
    text = (REPOSITORY / "docs/http-api.md").read_text()
    fields = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    assert {field for field in fields if not re.search(rf"\b{field}\b", text)} == set()


def test_the_limits_in_the_documents_are_the_defaults() -> None:
    text = " ".join((REPOSITORY / "docs/http-api.md").read_text().split())
    limits = RequestLimits()
    stated = (
        f"body {limits.max_body_bytes >> 20} MiB, JSON depth {limits.max_json_depth}, "
        f"{limits.max_messages:,} messages, {limits.max_tools} tools, {limits.max_stop} stop strings, "
        f"`n` {limits.max_n}, {limits.max_prompts} prompts, {limits.max_choices} choices (prompts times `n`), "
        f"{limits.max_prompt_chars >> 20} Mi characters a prompt"
    )
    assert stated in text


def test_the_readme_shows_commands_that_exist() -> None:
    shown = set(re.findall(r"^shoal (\w+)", (REPOSITORY / "README.md").read_text(), re.MULTILINE))
    assert shown <= set(COMMANDS)
    assert len(shown) >= 5
