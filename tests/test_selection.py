"""The tests that a run leaves out without --thorough, and their slices (conftest.py)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> ModuleType:
    path = str(Path(__file__).parent / "conftest.py")
    plugins = request.config.pluginmanager.get_plugins()
    return next(plugin for plugin in plugins if getattr(plugin, "__file__", None) == path)


class Case:
    """A test of the function `name`, as far as they are told apart."""

    def __init__(self, name: str, number: int, *marks: pytest.MarkDecorator):
        self.nodeid = f"{name}[{number}]"
        self._marks = {mark.name: mark.mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._marks.get(name)


def test_some_cases_are_kept_by_default_and_all_that_need_a_gpu(conftest: ModuleType) -> None:
    few = [Case("few", i, pytest.mark.thorough(keep=3)) for i in range(8)]
    none = [Case("none", i, pytest.mark.thorough) for i in range(2)]
    gpu = [Case("gpu", 0, pytest.mark.thorough, pytest.mark.gpu)]
    every = [Case("every", 0)]
    left_out = conftest._thorough([*few, *none, *gpu, *every])
    kept = [item.nodeid for item in [*few, *none, *gpu, *every] if item not in left_out]
    assert kept == ["few[0]", "few[2]", "few[5]", "gpu[0]", "every[0]"]


def test_a_test_is_in_the_same_slice_everywhere(conftest: ModuleType) -> None:
    shares = [conftest._share(Case("test", i), 10) for i in range(200)]
    assert set(shares) == set(range(1, 11))
    assert shares[:3] == [9, 3, 8]
