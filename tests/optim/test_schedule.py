from itertools import pairwise

import pytest
from optim.cases import Settings

from hybridpar.errors import ConfigError
from hybridpar.optim import learning_rate


def rates(num_steps, **kwargs):
    return [learning_rate(step, Settings(lr=1.0, min_lr=0.1, **kwargs), num_steps) for step in range(num_steps)]


def test_warmup_rises_from_its_first_share_to_the_peak():
    assert rates(6, warmup_steps=4, decay="constant") == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_decay_starts_at_the_peak_and_reaches_the_minimum_at_decay_steps(decay):
    values = rates(30, warmup_steps=4, decay=decay, decay_steps=20)
    assert values[3] == values[4] == 1.0
    assert values[12] == pytest.approx(0.55)  # half way
    assert all(a > b for a, b in pairwise(values[4:21]))
    assert values[20:] == pytest.approx([0.1] * 10)


def test_decay_steps_zero_means_the_whole_run():
    assert rates(20, decay="linear") == rates(20, decay="linear", decay_steps=20)
    assert rates(20, decay="linear")[-1] > 0.1


def test_warmup_as_long_as_the_run_and_longer_than_the_decay():
    assert rates(4, warmup_steps=4)[-1] == 1.0
    assert rates(6, warmup_steps=4, decay_steps=2)[4:] == pytest.approx([0.1, 0.1])


def test_one_step_runs_at_the_peak():
    assert rates(1) == [1.0]


def test_unknown_decay_is_refused():
    with pytest.raises(ConfigError, match=r"optim\.decay = 'exp'.*cosine"):
        rates(1, decay="exp")
