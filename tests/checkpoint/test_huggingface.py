"""Against transformers itself: equal logits on every grid, and nothing lost on the way there and
back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.exchange import (
    OURS,
    edit_config,
    edit_tensors,
    make_theirs,
    random_like,
    same_bits,
    save_ours,
    start_engine,
    tensors_of,
)
from ranks import run_ranks
from tensor_parallel import gathered
from torch import Tensor
from train.runs import metrics, steps, write_config

from hybridpar import checkpoint
from hybridpar.checkpoint.huggingface import compare, export_folder, import_folder
from hybridpar.checkpoint.huggingface.verify import (
    load_theirs,
    our_logits,
    random_batch,
    their_logits,
)
from hybridpar.checkpoint.stages import whole_model
from hybridpar.cli import main
from hybridpar.config import Launch, load_toml
from hybridpar.errors import CheckpointError
from hybridpar.train.engine import Engine
from hybridpar.train.job import train

transformers = pytest.importorskip("transformers")

GPT2 = {
    "vocab_size": 101,
    "n_positions": 20,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": 70,
}
BERT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 70,
    "max_position_embeddings": 20,
}
LLAMA = BERT | {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}
KV2 = LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 500.0}
KV3 = LLAMA | {
    "num_key_value_heads": 3,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
}
NEOX = BERT | {"num_attention_heads": 6, "rotary_pct": 0.25, "layer_norm_eps": 1e-3}
TINY = BERT | {
    "use_parallel_residual": False,
    "rotary_pct": 1.0,
    "hidden_act": "gelu_new",
    "tie_word_embeddings": True,
}
MODELS = {
    "gpt2": GPT2,
    "bert": BERT,
    "llama": LLAMA,
    "llama-kv2": KV2,
    "llama-kv3": KV3,
    "gpt_neox": NEOX,
    "gpt_neox-tiny": TINY,
}
GRIDS = [(3, 1), (1, 2)]
CASES = [
    *[(name, *grid) for name in ("gpt2", "bert", "llama", "gpt_neox") for grid in GRIDS],
    ("llama-kv2", 3, 1),
    ("llama-kv2", 2, 2),
    ("llama-kv3", 2, 1),
    ("gpt_neox-tiny", 3, 1),
    ("gpt_neox-tiny", 2, 2),
]
OF_FLOAT32 = 1e-4  # logits of up to 10 and more, by other kernels and in another order: some 1e-5


def logits_on_grid(engine: Engine, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits like our_logits', block by block over the stages of a grid."""
    blocks = engine.stage.blocks
    model = engine.config.model
    grid = engine.grid
    inputs = batch if model.kind == "bert" else {"tokens": batch["tokens"]}
    x: Any = None
    with torch.no_grad():
        for stage in range(grid.pp.size):
            if grid.pp.rank == stage:
                for number, block in blocks.items():
                    if int(number) <= model.num_layers:
                        x = block(x, inputs, None)
            x = gathered(x, grid.pp)[stage]
        if not grid.pp.is_last:
            return {}
        head: Any = blocks[str(model.num_layers + 1)]
        logits = {"words": head.logits(x)}
        return logits | ({"sentence": head.sentence_logits(x)} if model.kind == "bert" else {})


def start_and_save(start: Path, tp: int, pp: int, root: Path) -> dict[str, Tensor]:
    engine = start_engine(start, tp, pp)
    logits = logits_on_grid(engine, random_batch(engine.config.model))
    checkpoint.save(root, engine, "corpus")
    return logits


@pytest.mark.thorough(keep=2)
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "tp", "pp"), CASES)
def test_logits_are_equal_on_every_grid_and_the_way_back_changes_no_bit(
    tmp_path: Path, name: str, tp: int, pp: int
) -> None:
    theirs = make_theirs(tmp_path / "theirs", name.partition("-")[0], **MODELS[name])
    made = import_folder(theirs, tmp_path / "ours")
    model = checkpoint.read_manifest(made.checkpoint).config.model
    ours = run_ranks(start_and_save, tp * pp, made.checkpoint, tp, pp, tmp_path / "grid")[-1]
    batch = random_batch(model)
    expected = their_logits(theirs, model, batch)
    assert expected["words"].std() > 0.1
    assert ours.keys() == expected.keys()
    real = batch["padding_mask"]
    torch.testing.assert_close(
        ours["words"][real].double(), expected["words"][real], rtol=0, atol=OF_FLOAT32
    )
    if "sentence" in ours:
        torch.testing.assert_close(
            ours["sentence"].double(), expected["sentence"], rtol=0, atol=OF_FLOAT32
        )
    exported = export_folder(tmp_path / "grid" / "step_00000000", tmp_path / "back")
    same_bits(tensors_of(exported.folder), tensors_of(theirs))
    assert compare(made.checkpoint, exported.folder).ok


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (
            "gpt2",
            GPT2
            | {
                "tie_word_embeddings": False,
                "activation_function": "gelu",
                "layer_norm_epsilon": 1e-2,
            },
        ),
        (
            "gpt2",
            GPT2
            | {
                "n_inner": None,
                "activation_function": "gelu_pytorch_tanh",
                "dtype": torch.bfloat16,
            },
        ),
        ("mistral", LLAMA | {"sliding_window": None}),
        ("mistral", LLAMA | {"sliding_window": 20}),
        ("bert", BERT | {"head": "ForMaskedLM", "hidden_act": "gelu_new", "dtype": torch.float16}),
        ("bert", BERT | {"tie_word_embeddings": False}),
        (
            "gpt_neox",
            NEOX | {"hidden_act": "gelu_fast", "rotary_emb_base": 500, "dtype": torch.bfloat16},
        ),
        ("gpt_neox", BERT | {"rotary_pct": 0.3, "tie_word_embeddings": True}),
    ],
    ids=[
        "untied-exact",
        "bf16",
        "no-window",
        "long-window",
        "masked-lm-fp16",
        "bert-untied",
        "neox-bf16",
        "neox-tied",
    ],
)
def test_variants(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    theirs = make_theirs(tmp_path / "theirs", kind, **settings)
    assert main(["import", str(theirs), str(tmp_path / "ours"), "--verify"]) == 0
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--verify"]) == 0
    before = tensors_of(theirs)
    after = tensors_of(tmp_path / "back")
    if (
        "cls.predictions.decoder.bias" in before
    ):  # not tied, it is what is computed with; the other is left over
        before["cls.predictions.bias"] = before["cls.predictions.decoder.bias"]
    same_bits(after, before)


def their_loss(folder: Path, tokens: Tensor) -> float:
    loaded = load_theirs(folder, "AutoModelForCausalLM")
    with torch.no_grad():
        return float(loaded(input_ids=tokens, labels=tokens).loss)


def test_a_trained_gpt_is_the_same_model_there(tmp_path: Path) -> None:
    config = load_toml(write_config(tmp_path))
    run = train(config, Launch(0, 0, 1, 1)).folder
    made = export_folder(run, tmp_path / "theirs", max_file_bytes=20_000)
    assert len(list(made.folder.glob("*.safetensors"))) > 2
    assert compare(made.checkpoint, made.folder).ok
    config, weights = checkpoint.load_full(made.checkpoint)
    tokens = random_batch(config.model)["tokens"]
    logits = our_logits(config.model, whole_model(config.model, weights), {"tokens": tokens})[
        "words"
    ]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert their_loss(made.folder, tokens) == pytest.approx(float(loss), abs=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(made.folder, local_files_only=True)
    text = "Stone rivers clouding lamp. é→"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "<|endoftext|>"
    model = transformers.AutoModelForCausalLM.from_pretrained(made.folder, local_files_only=True)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    base = transformers.AutoModel.from_pretrained(made.folder, local_files_only=True)
    assert torch.equal(base.wte.weight, weights["blocks.0.tokens.weight"])
    import_folder(made.folder, tmp_path / "again")
    again = checkpoint.load_full(tmp_path / "again" / "checkpoints" / "step_00000000")[1]
    same_bits(again, weights)


@pytest.mark.thorough
def test_an_imported_model_trains_on_and_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_toml(write_config(tmp_path))
    run = train(config, Launch(0, 0, 1, 1)).folder
    assert main(["export", str(run), str(tmp_path / "theirs"), "--dtype", "bf16"]) == 0
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (plain["ok"], plain["dtype"], plain["notes"]) == (True, "bf16", [])
    flags = [
        "--data.corpus",
        str(tmp_path / "corpus.txt"),
        "--run.dir",
        str(tmp_path / "runs"),
        "--data.split",
        "0.2",
        "--train.num_steps",
        "3",
        "--train.device",
        "cpu",
        "--train.threads",
        "1",
        "--train.dtype",
        "fp32",
        "--optim.lr",
        "1e-3",
        "--json",
    ]
    assert main(["train", str(tmp_path / "ours" / "config.toml"), *flags]) == 0
    fresh, going_on = (
        steps(metrics(folder))[0][1] for folder in (run, tmp_path / "runs" / "ours-trained")
    )
    assert going_on < fresh - 0.1  # it goes on from what was learnt
    capsys.readouterr()
    assert (
        main(["generate", "--checkpoint", str(tmp_path / "ours"), "--max_tokens", "3", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["ok"]


@pytest.mark.thorough
def test_berts_tokenizer_puts_pairs_together_as_in_training(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    path.write_text(path.read_text().replace("[model]", '[model]\nkind = "bert"'))
    run = train(load_toml(path), Launch(0, 0, 1, 1)).folder
    made = export_folder(run, tmp_path / "theirs")
    tokenizer = transformers.AutoTokenizer.from_pretrained(made.folder, local_files_only=True)
    pair = tokenizer("stone", "river")
    words = tokenizer.convert_ids_to_tokens(pair["input_ids"])
    assert (words[0], words[-1], words.count("[SEP]")) == ("[CLS]", "[SEP]", 2)
    assert pair["token_type_ids"] == [0] * (words.index("[SEP]") + 1) + [1] * (
        len(words) - words.index("[SEP]") - 1
    )
    assert tokenizer.mask_token == "[MASK]"
    model = transformers.AutoModelForPreTraining.from_pretrained(made.folder, local_files_only=True)
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert compare(made.checkpoint, made.folder).ok


def test_files_of_the_base_model_and_of_older_versions_are_known(tmp_path: Path) -> None:
    """Published files such as openai-community/gpt2 and google-bert/bert-base-uncased: other
    prefixes and endings, masks, positions."""
    theirs = make_theirs(tmp_path / "gpt2", "gpt2", **GPT2)

    def as_base(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 20, 20)

    expected = tensors_of(theirs)
    edit_tensors(theirs, as_base)
    made = import_folder(theirs, tmp_path / "ours")
    assert "1 tensors that take no part in gpt2 passed over: h.0.attn.bias" in made.notes[0]
    same_bits(tensors_of(export_folder(made.checkpoint, tmp_path / "back").folder), expected)

    theirs = make_theirs(tmp_path / "bert", "bert", **BERT)

    def as_old(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            tensors[name.replace(".weight", ".gamma").replace(".bias", ".beta")] = tensors.pop(name)
        tensors["cls.predictions.decoder.weight"] = tensors[
            "bert.embeddings.word_embeddings.weight"
        ].clone()
        tensors["bert.embeddings.position_ids"] = torch.arange(20).unsqueeze(0)

    expected = tensors_of(theirs)
    edit_tensors(theirs, as_old)
    edit_config(theirs, architectures=["BertForMaskedLM"], position_embedding_type="absolute")
    made = import_folder(theirs, tmp_path / "ours-bert")
    same_bits(tensors_of(export_folder(made.checkpoint, tmp_path / "back-bert").folder), expected)
    edit_tensors(theirs, lambda tensors: tensors["cls.predictions.decoder.weight"].add_(1))
    with pytest.raises(
        CheckpointError, match=r"decoder\.weight and .*word_embeddings\.weight differ.*ties them"
    ):
        import_folder(theirs, tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_the_sentence_head_survives(tmp_path: Path) -> None:
    for head in ("nsp", "sop", "none"):
        model = replace(OURS["bert"], sentence_head=head)  # type: ignore[arg-type]
        folder = save_ours(tmp_path / head, model)
        made = import_folder(
            export_folder(folder, tmp_path / f"{head}-theirs").folder, tmp_path / f"{head}-again"
        )
        assert checkpoint.read_manifest(made.checkpoint).config.model.sentence_head == head
        assert compare(made.checkpoint, tmp_path / f"{head}-theirs").ok


def test_precision_is_as_asked_for(tmp_path: Path) -> None:
    folder = save_ours(tmp_path / "checkpoints", OURS["gpt2"])
    made = export_folder(folder, tmp_path / "half", dtype="bf16")
    exact = random_like("blocks.0.tokens.weight", (101, 48))
    assert torch.equal(tensors_of(made.folder)["transformer.wte.weight"], exact.bfloat16())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        made.folder, dtype="auto", local_files_only=True
    )
    assert model.dtype == torch.bfloat16
