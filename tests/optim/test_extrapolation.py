import pytest
import torch
from optim.cases import INIT, ONE, Settings

from hybridpar.nn.placement import Placement
from hybridpar.optim import Extrapolation, NAdamW, ParameterSlot, build_optimizer

SLOT = ParameterSlot("w", Placement((3, 2), INIT))
CURVATURE = torch.rand(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def start():
    return torch.ones(3, 2, dtype=torch.float64)


def test_applied_step_is_the_update_and_its_change():
    """SGD with lr 1 makes the update -g; the first counts double."""
    optimizer = build_optimizer(
        Settings(name="sgd", momentum=0.0, weight_decay=0.0, staleness="extrapolation"), [SLOT], ONE
    )
    x = start()
    seen = []
    for g in (1.0, 4.0, 2.0):
        optimizer.step([x], [torch.full_like(x, g)], lr=1.0)
        seen.append(x[0, 0].item())
    assert seen == [1 - 2, -1 - (2 * 4 - 1), -8 - (2 * 2 - 4)]
    assert optimizer.num_updates == 3


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_is_prediction_seen_from_the_other_side(name):
    """Gradients taken one step ahead of the optimizer's path z, at z + (z - the z before); here x
    is that point."""
    settings = Settings(name=name, weight_decay=0.0, staleness="extrapolation")
    extrapolating = build_optimizer(settings, [SLOT], ONE)
    plain = build_optimizer(Settings(name=name, weight_decay=0.0), [SLOT], ONE)
    x = start()
    z = start()
    points = [start()]
    for _ in range(12):
        stale = points[max(len(points) - 2, 0)]
        extrapolating.step([x], [CURVATURE * stale], lr=0.1)
        before = z.clone()
        plain.step([z], [CURVATURE * stale], lr=0.1)
        points.append(z + (z - before))
        torch.testing.assert_close(x, points[-1], rtol=1e-12, atol=1e-12)


def test_gradients_come_from_near_where_undelayed_descent_is():
    """On the path z of the update rule alone; the error is of second order in lr instead of the
    first."""
    settings = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    errors = {}
    for lr in (0.1, 0.05):
        for staleness in ("none", "extrapolation"):
            optimizer = build_optimizer(Settings(**settings, staleness=staleness), [SLOT], ONE)
            x = start()
            stale = start()
            undelayed = start()
            for _ in range(round(1 / lr)):
                gradient = stale.clone()
                stale = x.clone()
                optimizer.step([x], [gradient.clone()], lr=lr)
                undelayed -= lr * undelayed
            path = x + lr * gradient if staleness == "extrapolation" else x
            errors[staleness, lr] = (path - undelayed).abs().max().item()
    assert errors["none", 0.05] > errors["none", 0.1] / 2.5
    assert errors["extrapolation", 0.05] < errors["extrapolation", 0.1] / 3
    assert errors["extrapolation", 0.1] < errors["none", 0.1] / 3


def test_staleness_names_the_optimizer():
    assert type(build_optimizer(Settings(staleness="nesterov"), [SLOT], ONE)) is NAdamW
    assert type(build_optimizer(Settings(staleness="extrapolation"), [SLOT], ONE)) is Extrapolation
    for staleness in ("none", "prediction", "lr_rescale"):
        assert type(build_optimizer(Settings(staleness=staleness), [SLOT], ONE)).__name__ == "AdamW"
    assert build_optimizer(
        Settings(name="sgd", staleness="nesterov"), [SLOT], ONE
    ).settings.nesterov
