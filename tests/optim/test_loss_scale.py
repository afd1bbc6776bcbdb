import torch

from hybridpar.optim import LossScaler


def test_halves_on_overflow_and_doubles_after_good_steps():
    scaler = LossScaler(1024.0, dynamic=True, growth_interval=3)
    seen = []
    for found_inf in [False, False, True, False, False, False, False, True, True]:
        scaler.update(found_inf)
        seen.append(scaler.scale)
    assert seen == [1024, 1024, 512, 512, 512, 1024, 1024, 512, 256]


def test_stays_in_bounds():
    scaler = LossScaler(2.0, dynamic=True, growth_interval=1)
    for _ in range(5):
        scaler.update(True)
    assert scaler.scale == 1.0
    for _ in range(40):
        scaler.update(False)
    assert scaler.scale == 2.0**24


def test_hysteresis_tolerates_some_overflows():
    scaler = LossScaler(8.0, dynamic=True, growth_interval=2, hysteresis=2)
    for found_inf in (False, True, False):  # never two good ones in a row
        scaler.update(found_inf)
        assert scaler.scale == 8.0
    scaler.update(True)
    assert scaler.scale == 4.0


def test_batches_that_ran_at_another_scale_say_nothing():
    scaler = LossScaler(1024.0, dynamic=True, growth_interval=2)
    scaler.update(True, 1024.0)
    scaler.update(True, 1024.0)  # was under way when the first overflowed
    assert scaler.scale == 512.0
    scaler.update(False, 512.0)
    scaler.update(False, 1024.0)
    assert scaler.scale == 512.0
    scaler.update(False, 512.0)
    assert scaler.scale == 1024.0


def test_static_never_moves():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        scaler = LossScaler.for_dtype(dtype)
        scaler.update(True)
        scaler.load_state({"scale": 4.0, "good_steps": 0, "overflows": 0})
        assert scaler.scale == 1.0


def test_state_round_trip():
    first = LossScaler.for_dtype(torch.float16, 256.0)
    for found_inf in (False, True, False, False):
        first.update(found_inf)
    second = LossScaler.for_dtype(torch.float16)
    second.load_state(first.state())
    assert second == first
    assert second.scale == 128.0
