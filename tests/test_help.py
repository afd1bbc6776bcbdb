"""Every flag of every command, and every key of the configuration, has a description."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap

import pytest

from hybridpar.cli.commands import COMMANDS
from hybridpar.config import Config

SECTIONS = {field.name: type(getattr(Config(), field.name)) for field in dataclasses.fields(Config)}


def without_description(settings: type) -> list[str]:
    """Names of a dataclass's fields that no docstring follows."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    assert isinstance(node, ast.ClassDef)
    names = {field.name for field in dataclasses.fields(settings)}
    missing = []
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if statement.target.id in names and not is_text:
                missing.append(statement.target.id)
    return missing


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_has_a_description(name: str) -> None:
    assert without_description(SECTIONS[name]) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_has_a_description(name: str) -> None:
    described_once = {"path", "config"}  # by what ConfigFile and Overrides say
    assert set(without_description(COMMANDS[name])) - described_once == set()
