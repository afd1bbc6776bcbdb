"""Two towers, of users and of films, whose dot product tells who likes what: python examples/two_towers.py

No row of modules, so the model is a class. Its towers are of hybridpar's layers, which tensor parallelism divides.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import hybridpar as hp


@dataclass(frozen=True)
class TwoTowers(hp.ModelSpec):
    users: int = 200
    films: int = 300
    width: int = 16
    depth: int = 2

    metric_names = ("accuracy",)
    num_blocks = property(lambda self: self.depth + 2)
    max_tp = property(lambda self: self.width)

    def activation_shape(self, number):
        return {"user": (self.width,), "film": (self.width,)}

    def block(self, number, build):
        return Tables(self) if number == 0 else Layers(self, build) if number <= self.depth else Match()

    def dataset(self, part):
        return ratings(self, *{"train": (20_000, 1), "valid": (2_000, 2)}[part])


class Tables(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.user, self.film = nn.Embedding(model.users, model.width), nn.Embedding(model.films, model.width)

    def forward(self, x, batch, key):
        return {"user": 0.3 * self.user(batch["user"]), "film": 0.3 * self.film(batch["film"])}


class Layers(nn.Module):
    def __init__(self, model, build):
        super().__init__()
        self.towers = nn.ModuleDict({name: hp.ParallelMLP(model.width, 4 * model.width, build.axis, **build.factory)
                                     for name in ("user", "film")})

    def forward(self, x, batch, key):
        return {name: x[name] + tower(x[name]) for name, tower in self.towers.items()}


class Match(nn.Module):
    def forward(self, x, batch, key):
        score = (x["user"] * x["film"]).sum(-1)
        loss = functional.binary_cross_entropy_with_logits(score, batch["likes"], reduction="sum")
        right = ((score > 0) == (batch["likes"] > 0.5)).double().sum()
        return {"loss": loss / batch["num_samples"]}, {"accuracy": right / batch["num_samples"]}


def ratings(model, number, seed):
    taste = torch.Generator().manual_seed(0)  # of all parts
    users, films = (torch.randn(count, 3, generator=taste) for count in (model.users, model.films))
    random = torch.Generator().manual_seed(seed)
    user, film = (torch.randint(len(rows), (number,), generator=random) for rows in (users, films))
    likes = ((users[user] * films[film]).sum(-1) > 0).float()
    return [{"user": u, "film": f, "likes": yes} for u, f, yes in zip(user, film, likes, strict=True)]


if __name__ == "__main__":
    trainer = hp.Trainer(TwoTowers(), parallel={"tp": 2}, optim={"lr": 1e-2}, run={"name": "two_towers"},
                         train={"num_steps": 300, "micro_batch_size": 64, "eval_interval": 100, "eval_batches": 4})
    for grid in ({"tp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "dp": 2}):
        print(f"{grid} is one process:", trainer.verify(grid, num_batches=2).ok)
    trainer.fit()
    print("validation:", trainer.evaluate())
    print("users:", trainer.state_dict()["blocks.0.user.weight"])
