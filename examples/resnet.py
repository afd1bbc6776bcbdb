"""A ResNet of plain torch modules that finds the rotation of a stripe pattern: python examples/resnet.py

GroupNorm stands for BatchNorm, whose results depend on the other images of a micro-batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import hybridpar as hp

CLASSES, SIZE = 8, 32


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, after), nn.GroupNorm(8, after)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.skip(x) + self.norm2(self.conv2(out)))


def resnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()),
        Block(16, 16, 1), Block(16, 16, 1), Block(16, 32, 2), Block(32, 32, 1), Block(32, 64, 2), Block(64, 64, 1),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, CLASSES)))


def images(number: int, seed: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (number,), generator=random)
    angle = (torch.pi * labels / CLASSES)[:, None, None]
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    width = 0.4 + 0.5 * torch.rand(number, 1, 1, generator=random)
    shift = 6 * torch.rand(number, 1, 1, generator=random)
    waves = torch.sin(width * (x * angle.cos() + y * angle.sin()) + shift)
    noisy = waves + 0.8 * torch.randn(number, SIZE, SIZE, generator=random)
    return [{"x": image[None], "label": label} for image, label in zip(noisy, labels, strict=True)]


def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(out, batch["label"])


def metrics(out: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"accuracy": (out.argmax(-1) == batch["label"]).double().mean()}


def reached(step: int, numbers: dict[str, float]) -> object:
    return hp.STOP if numbers["accuracy"] > 0.95 else None


if __name__ == "__main__":
    torch.manual_seed(1)
    model = resnet()
    trainer = hp.Trainer(
        model, loss=loss, metrics=metrics, datasets={"train": images(4000, 1), "valid": images(400, 2)},
        parallel={"dp": 2}, optim={"lr": 3e-3, "weight_decay": 0.05, "warmup_steps": 10}, run={"name": "resnet"},
        train={"num_steps": 150, "micro_batch_size": 16, "eval_interval": 25, "eval_batches": 3})
    for grid in ({"pp": 2}, {"pp": 2, "dp": 2}):
        print(f"{grid} is one process:", trainer.verify(grid, num_batches=2).ok)
    outcome = trainer.fit(on_evaluation=reached)
    print("validation by step:", {step: row["val_accuracy"] for step, row in outcome.history.validation.items()})
    print("validation:", trainer.evaluate())
    model.load_state_dict(trainer.state_dict())
    sample = images(1, 3)[0]
    print(f"class {int(sample['label'])}, found {int(model.eval()(sample['x'][None]).argmax())}")
