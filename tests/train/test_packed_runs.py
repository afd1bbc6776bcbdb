"""Whole runs on packed text: stopped, resumed, and on another grid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train.runs import metrics, run_job, steps, write_config

from hybridpar.data import train_tokenizer

pytestmark = pytest.mark.ranks


def text_flags(folder: Path, packing: str) -> list[str]:
    text = folder / "documents.jsonl"
    lines = [json.dumps({"text": f"Record {i}: {'ab c ' * (i % 7)}"}) for i in range(120)]
    text.write_text("\n".join(lines))
    return ["--data.corpus", str(text), "--data.packing", packing]


def chat_flags(folder: Path) -> list[str]:
    """Conversations whose answers alone are learned, with adapters."""
    chat = folder / "chat.jsonl"
    lines = [json.dumps({"prompt": f"{i}?", "answer": "ab " * (i % 5 + 1)}) for i in range(120)]
    chat.write_text("\n".join(lines))
    template = folder / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{% endif %}"
    )
    train_tokenizer(lines, 300).save(folder / "tokenizer.json")
    flags = ["--data.corpus", str(chat), "--data.format", "chat", "--data.packing", "best_fit"]
    flags += ["--data.chat_template", str(template), "--model.lora_rank", "3"]
    return [*flags, "--data.tokenizer", str(folder / "tokenizer.json"), "--data.split", "0.2"]


@pytest.mark.thorough
@pytest.mark.parametrize("source", ["conversations", "best_fit", "stream"])
def test_a_packed_run_resumes_on_another_grid(tmp_path: Path, source: str) -> None:
    """A resumed run has the samples that it would have had: losses of validation, too."""
    flags = text_flags(tmp_path, source) if source != "conversations" else chat_flags(tmp_path)
    path = write_config(tmp_path, "1f1b")
    flags += ["--train.dtype", "fp64", "--train.log_interval", "1", "--train.num_steps", "4"]

    def run(name: str, ranks: int, *more: str) -> None:
        run_job(ranks, "train", path, *flags, "--run.name", name, *more)

    two_stages = ("--parallel.pp", "2")
    run("whole", 2, *two_stages)
    flags += ["--optim.decay_steps", "4"]
    run("parts", 2, *two_stages, "--train.num_steps", "2")
    run("parts", 2, "--parallel.dp", "2", "--train.micro_batch_size", "1")
    whole, parts = (metrics(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert [step for step, _, _ in steps(whole)] == [1, 2, 3, 4]
    for a, b in zip(steps(whole), steps(parts), strict=True):
        assert a == pytest.approx(b, rel=1e-9)
    losses = [
        [row["val_loss"] for row in rows if row.get("step") == 4 and "val_loss" in row]
        for rows in (whole, parts)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
