import contextlib

import pytest
import torch

with contextlib.suppress(ImportError):  # what tests a GPU does without it
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)  # how busy the machine is says nothing of the code
    settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=10, help="how often each test of kill -9 kills; 100: a thorough run")


@pytest.fixture
def num_kills(request: pytest.FixtureRequest) -> int:
    """--kills"""
    return int(request.config.getoption("--kills"))


@pytest.fixture(autouse=True)
def _one_thread():
    """Ranks are processes here; threads inside them would only fight for the cores."""
    torch.set_num_threads(1)
