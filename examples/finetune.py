"""Fine-tuning an imported model: of each conversation, the loss counts the answer alone.

    hybridpar import gpt2/ runs/gpt2                              # a folder from Hugging Face
    python examples/finetune.py runs/gpt2 questions.jsonl         # lines of {"prompt": .., "answer": ..}
    torchrun --nproc-per-node 2 examples/finetune.py runs/gpt2 questions.jsonl --pp 2
    hybridpar generate --checkpoint runs/gpt2-tuned --prompt "Why is the sky blue?"
"""

import argparse
import json
from pathlib import Path

import numpy as np

import hybridpar as hp


def samples(path, tokenizer, length):
    """One for each line: tokens, and for each the one behind it as its label, or -100 where it is not to be learned."""
    made = []
    for line in Path(path).read_bytes().split(b"\n"):  # a line may hold other separators, such as U+2028
        if not line.strip():
            continue
        pair = json.loads(line)
        prompt, whole = (tokenizer.encode_prompt(text) for text in (pair["prompt"], pair["prompt"] + pair["answer"]))
        joins = whole[: len(prompt)] != prompt  # a token reaches over the end of the prompt
        answer = tokenizer.encode(pair["answer"]).tolist() if joins else whole[len(prompt) :]
        text = np.full(length + 1, tokenizer.end)
        text[: len(prompt) + len(answer)] = (prompt + answer)[: length + 1]
        counts = np.zeros(length + 1, bool)
        counts[len(prompt) : len(prompt) + len(answer) + 1] = True  # with the end behind it
        if counts[1:].any():  # else the prompt alone fills the window
            made.append({"tokens": text[:-1], "labels": np.where(counts, text, -100)[1:]})
    return made


def main(argv=None):
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("run", type=Path)
    arguments.add_argument("questions", type=Path)
    arguments.add_argument("--pp", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--lr", type=float, default=1e-4)
    given = arguments.parse_args(argv)
    base = hp.load_toml(given.run / "config.toml")
    made = samples(given.questions, hp.Tokenizer.load(given.run / "tokenizer.json"), base.model.seq_length)
    held_out = max(1, len(made) // 10)
    return hp.Trainer(config=base, datasets={"train": made[held_out:], "valid": made[:held_out]},
                      parallel={"pp": given.pp, "dp": 0}, pipeline={"schedule": "2bw", "num_microbatches": 4},
                      optim={"lr": given.lr, "warmup_steps": 10},
                      train={"num_steps": given.steps, "micro_batch_size": 4, "eval_interval": given.steps},
                      run={"dir": str(given.run.parent), "name": f"{given.run.name}-tuned"}).fit()


if __name__ == "__main__":
    main()
