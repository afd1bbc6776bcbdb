import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Ranks are processes here; threads inside them would only fight for the cores."""
    torch.set_num_threads(1)
