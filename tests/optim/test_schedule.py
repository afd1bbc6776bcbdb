import random
from dataclasses import replace
from itertools import pairwise
from math import cos, inf, pi

import numpy as np
import pytest
from optim.cases import Settings

from hybridpar.config import OptimConfig
from hybridpar.errors import ConfigError
from hybridpar.optim import learning_rate
from hybridpar.optim.schedule import delay_factor, describe_points, tabulate


def rates(num_steps, **kwargs):
    return [
        learning_rate(step, Settings(lr=1.0, min_lr=0.1, **kwargs), num_steps)
        for step in range(num_steps)
    ]


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


def test_wsd_stays_at_the_peak_and_decays_by_one_minus_the_root_over_its_last_steps():
    values = rates(20, warmup_steps=4, decay="wsd", decay_steps=5)
    assert values[3:16] == pytest.approx([1.0] * 13)
    assert values[15:] == pytest.approx([0.1 + 0.9 * (1 - (i / 5) ** 0.5) for i in range(5)])
    assert rates(20, decay="wsd") == rates(20, decay="wsd", decay_steps=4), "a fifth of the run"
    assert learning_rate(20, Settings(lr=1.0, min_lr=0.1, decay="wsd"), 20) == 0.1
    assert rates(6, warmup_steps=4, decay="wsd", decay_steps=9)[:5] == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 1.0]
    )


@pytest.mark.parametrize(
    "options", [{}, {"decay_steps": 6}, {"staleness": "lr_rescale", "staleness_steps": 9}]
)
def test_more_steps_of_wsd_change_no_rate_before_its_decay(options):
    short, long = (rates(steps, warmup_steps=3, decay="wsd", **options) for steps in (40, 90))
    decay = options.get("decay_steps", 8)
    assert long[: 40 - decay] == short[: 40 - decay]
    assert long[39] > short[39]


def roots_of_delayed_descent(rate, delay):
    """w' = w - rate * (w of `delay` steps ago): the largest root's size says whether it shrinks."""
    return max(abs(np.roots([1, -1, *[0] * (delay - 1), rate] if delay else [1, rate - 1])))


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 7])
def test_delay_factor_is_where_delayed_descent_becomes_unstable(delay):
    factor = delay_factor(0, Settings(staleness="lr_rescale"), 100, delay)
    assert roots_of_delayed_descent(2 * factor * 0.999, delay) < 1
    assert roots_of_delayed_descent(2 * factor * 1.001, delay) > 1


def test_rescaled_rate_returns_to_its_full_value():
    settings = Settings(lr=1.0, decay="constant", staleness="lr_rescale")
    values = [learning_rate(step, settings, 40, delay=1.0) for step in range(6)]
    assert values == pytest.approx([0.5 ** (1 - step / 4) for step in range(5)] + [1.0])
    settings = replace(settings, staleness_steps=2)
    assert [learning_rate(step, settings, 40, delay=1.0) for step in range(4)] == pytest.approx(
        [0.5, 0.5**0.5, 1, 1]
    )
    assert learning_rate(0, settings, 40) == 1.0  # no delay
    assert (
        learning_rate(0, Settings(lr=1.0, decay="constant"), 40, delay=1.0) == 1.0
    )  # not asked for


def test_rescaling_multiplies_the_schedule():
    plain = Settings(lr=1.0, warmup_steps=4)
    rescaled = Settings(lr=1.0, warmup_steps=4, staleness="lr_rescale", staleness_steps=10)
    for step in range(20):
        factor = delay_factor(step, rescaled, 20, 0.5)
        assert learning_rate(step, rescaled, 20, 0.5) == learning_rate(step, plain, 20) * factor


def test_points_are_exact_linear_between_and_constant_outside():
    points = ((2, 0.5), (4, 1.5), (10, 0.3))
    values = rates(14, lr_points=points, warmup_steps=5, decay="linear")
    assert values[:3] == [0.5, 0.5, 0.5]
    assert values[3] == 1.0
    assert values[4] == 1.5
    assert values[7] == pytest.approx(0.9)
    assert values[10:] == [0.3] * 4


def test_points_of_a_stale_schedule_are_scaled_as_any_rate():
    settings = Settings(lr_points=((0, 1.0),), staleness="lr_rescale", staleness_steps=4)
    assert learning_rate(0, settings, 20, 1.0) == delay_factor(0, settings, 20, 1.0) < 1
    assert learning_rate(4, settings, 20, 1.0) == 1.0


@pytest.mark.parametrize(
    "schedule",
    [
        lambda step: 1e-3 * 0.5 * (1 + cos(pi * step / 3000)),
        lambda step: 1e-3 * 0.1 ** (step // 700),
        lambda step: 1e-2 * min(1, (step + 1) / 50) / (1 + step) ** 0.5,
        lambda step: 0,
        lambda step: np.float32(2),
    ],
)
@pytest.mark.parametrize("num_steps", [1, 2, 3000])
def test_a_function_becomes_a_table_that_says_the_same(schedule, num_steps):
    points = tabulate(schedule, num_steps)
    assert len(points) <= num_steps
    assert len(points) < 1500
    settings = Settings(lr_points=points)
    found = [learning_rate(step, settings, num_steps) for step in range(num_steps)]
    highest = float(max(schedule(step) for step in range(num_steps)))
    assert found == pytest.approx(
        [schedule(step) for step in range(num_steps)], rel=0, abs=1.01e-6 * highest
    )
    assert found[-1] == schedule(num_steps - 1)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (lambda step: -1e-3, "for step 0 it returned -0.001"),
        (lambda step: inf if step == 3 else 1, "for step 3"),
        (lambda step: None, "for step 0 it returned None"),
        (lambda step: random.random(), "the same number each time"),
        (lambda step: float("nan"), "finite"),
    ],
)
def test_a_function_that_is_no_schedule_is_refused(schedule, said):
    with pytest.raises(ConfigError, match="lr_schedule = .*" + said):
        tabulate(schedule, 10)


def test_a_table_in_a_line():
    line = describe_points(((0, 0.0), (100, 1e-3), (1000, 1e-4)))
    assert line.endswith("(3): 0 at update 0, 0.001 at update 100, 0.0001 at update 1000")
    assert describe_points(((0, 0.5),)).endswith("(1): 0.5 at update 0")


def test_cosine_with_restarts_decays_again_from_the_peak_in_equal_cycles():
    settings = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=3, restarts=2)
    rates = [learning_rate(step, settings, 33) for step in range(34)]
    once = OptimConfig(lr=1.0, min_lr=0.1)
    cycle = [learning_rate(step, once, 10) for step in range(10)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[3:33] == pytest.approx(cycle * 3)
    assert rates[33] == pytest.approx(0.1)
    assert [rates[i] for i in (3, 13, 23)] == [1.0] * 3
