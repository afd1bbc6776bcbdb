"""A GPT of plain torch modules, trained on the source of Python's standard library: python examples/plain_gpt.py

Its modules form a row, so they need no class of ours: two processes train them as a pipeline, and the weights go back
into the same modules, which then write text without hybridpar.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import hybridpar as hp

WIDTH, HEADS, DEPTH, CONTEXT = 128, 4, 4, 128  # a token is a byte


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), batch["next"].flatten())


def metrics(logits: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"accuracy": (logits.argmax(-1) == batch["next"]).double().mean()}


def samples(files: list[Path]) -> list[dict[str, Tensor]]:
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    rows = text[: (len(text) - 1) // CONTEXT * CONTEXT + 1]
    return [{"x": x, "next": y} for x, y in zip(rows[:-1].split(CONTEXT), rows[1:].split(CONTEXT), strict=True)]


@torch.no_grad()
def write(model: nn.Module, prompt: str, num_bytes: int) -> str:
    text = torch.tensor([list(prompt.encode())])
    for _ in range(num_bytes):
        chances = (model(text[:, -CONTEXT:])[:, -1] / 0.7).softmax(-1)
        text = torch.cat([text, chances.multinomial(1)], 1)
    return bytes(text[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    torch.manual_seed(1)
    model = nn.Sequential(Embedding(), *(Layer() for _ in range(DEPTH)),
                          nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    trainer = hp.Trainer(
        model, loss=loss, metrics=metrics, datasets={"train": samples(files[5:]), "valid": samples(files[:5])},
        parallel={"pp": 2}, pipeline={"schedule": "2bw", "num_microbatches": 4}, optim={"lr": 2e-3, "warmup_steps": 20},
        train={"num_steps": 200, "micro_batch_size": 8, "eval_interval": 100}, run={"name": "plain_gpt"})
    print("pp=2 dp=2 is one process:", trainer.verify({"pp": 2, "dp": 2}, num_batches=2).ok)
    losses = trainer.fit().history.losses
    print(f"loss of step 1: {losses[1]:.2f}, of the last one: {losses[max(losses)]:.2f}")
    print("validation:", trainer.evaluate())
    model.load_state_dict(trainer.state_dict())
    print(write(model.eval(), "def ", 200))
