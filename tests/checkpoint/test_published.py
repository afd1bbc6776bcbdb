"""Folders as they are published: bare models, other heads' leftovers, older names, older files, odd
sizes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.exchange import edit_config, edit_tensors, make_theirs, same_bits, tensors_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.checkpoint.huggingface import compare, export_folder, import_folder
from hybridpar.cli import main
from hybridpar.errors import CheckpointError, DataError

transformers = pytest.importorskip("transformers")

BERT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 70,
    "max_position_embeddings": 20,
}
GPT2 = {"vocab_size": 101, "n_positions": 20, "n_embd": 48, "n_layer": 2, "n_head": 3}
LLAMA = BERT | {"num_key_value_heads": 1}


def keep(pattern: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if not name.startswith(pattern)]:
            del tensors[name]

    return change


@pytest.mark.parametrize("head", ["Model", "ForPreTraining"])
def test_a_bare_bert_as_sentence_transformers_has_them(
    tmp_path: Path, head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saved as BertModel, or with the prefix of a model with heads; with a buffer of positions."""
    theirs = make_theirs(tmp_path / "theirs", "bert", head=head, **BERT)
    prefix = "" if head == "Model" else "bert."
    edit_tensors(theirs, keep(prefix))
    edit_tensors(
        theirs, lambda t: t.update({f"{prefix}embeddings.position_ids": torch.arange(20)[None]})
    )
    assert main(["import", str(theirs), str(tmp_path / "ours"), "--verify"]) == 0
    assert (
        "no blocks.3.transform, blocks.3.norm, blocks.3.language_model.projection, "
        "blocks.3.classifier, which are initialized" in (capsys.readouterr().out)
    )
    made = export_folder(tmp_path / "ours", tmp_path / "back")
    assert compare(made.checkpoint, made.folder).ok
    base, again = (
        transformers.AutoModel.from_pretrained(folder) for folder in (theirs, made.folder)
    )
    same_bits(again.state_dict(), base.state_dict())
    weights = checkpoint.load_full(made.checkpoint)[1]
    assert 0.01 < weights["blocks.3.transform.weight"].std() < 0.03  # as [model] init_std says
    assert (weights["blocks.3.norm.weight"] == 1).all()


def test_a_bare_bert_is_compared_with_care(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = make_theirs(tmp_path / "theirs", "bert", head="Model", **BERT)
    made = import_folder(theirs, tmp_path / "ours")
    assert made.started_anew
    edit_tensors(theirs, lambda t: t["encoder.layer.1.output.dense.weight"].mul_(1.01))
    assert compare(made.checkpoint, theirs, bare=True).difference > 1e-3
    edit_tensors(theirs, lambda t: t["pooler.dense.bias"].add_(0.01))
    assert not compare(made.checkpoint, theirs, bare=True).ok
    edit_tensors(theirs, lambda t: t.pop("encoder.layer.1.output.dense.weight"))
    with pytest.raises(CheckpointError, match=r"output\.dense\.weight is missing"):
        import_folder(theirs, tmp_path / "never")


def test_a_bert_without_pooler(tmp_path: Path) -> None:
    theirs = make_theirs(tmp_path / "theirs", "bert", head="Model", **BERT)
    edit_tensors(theirs, lambda t: [t.pop(f"pooler.dense.{n}") for n in ("weight", "bias")])  # type: ignore[func-returns-value]
    assert main(["import", str(theirs), str(tmp_path / "ours"), "--verify"]) == 0
    assert checkpoint.read_manifest(
        tmp_path / "ours" / "checkpoints" / "step_00000000"
    ).config.model.sentence_head == ("none")


def test_half_a_head_is_no_head(tmp_path: Path) -> None:
    theirs = make_theirs(tmp_path / "theirs", "bert", **BERT)
    edit_tensors(theirs, lambda t: t.pop("cls.predictions.transform.dense.bias"))
    with pytest.raises(CheckpointError, match=r"transform\.dense\.bias is missing"):
        import_folder(theirs, tmp_path / "ours")


def test_a_masked_language_model_with_a_pooler(tmp_path: Path) -> None:
    """A BertForMaskedLM in the form in which transformers 3 saved it."""
    theirs = make_theirs(tmp_path / "theirs", "bert", **BERT)
    edit_tensors(theirs, lambda t: [t.pop(f"cls.seq_relationship.{n}") for n in ("weight", "bias")])  # type: ignore[func-returns-value]
    made = import_folder(theirs, tmp_path / "ours")
    assert made.started_anew == ("blocks.3.classifier.weight", "blocks.3.classifier.bias")
    assert compare(made.checkpoint, theirs, bare=True).ok


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("bert", BERT), ("gpt2", GPT2), ("llama", LLAMA), ("gpt_neox", BERT | {"rotary_pct": 0.25})],
)
def test_a_folder_that_names_no_model_type(
    tmp_path: Path, kind: str, sizes: dict[str, Any]
) -> None:
    """Like prajjwal1/bert-tiny, whose files are of torch.save, too."""
    theirs = make_theirs(tmp_path / "theirs", kind, **sizes)
    expected = import_folder(theirs, tmp_path / "expected")
    edit_config(theirs, model_type="REMOVE", architectures="REMOVE")
    torch.save(tensors_of(theirs), theirs / "pytorch_model.bin")
    (theirs / "model.safetensors").unlink()
    made = import_folder(theirs, tmp_path / "ours")
    assert made.model_type == kind
    same_bits(*(checkpoint.load_full(m.checkpoint)[1] for m in (made, expected)))


def test_positions_of_older_llamas(tmp_path: Path) -> None:
    theirs = make_theirs(tmp_path / "theirs", "llama", **LLAMA)
    edit_tensors(
        theirs,
        lambda t: t.update(
            {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
        ),
    )
    assert (
        "2 tensors that take no part in llama" in import_folder(theirs, tmp_path / "ours").notes[0]
    )


def test_a_pythia_as_it_was_published(tmp_path: Path) -> None:
    """Its keys of rotary positions, and what its files hold besides parameters."""
    theirs = make_theirs(
        tmp_path / "theirs", "gpt_neox", **BERT, rotary_pct=0.5, rotary_emb_base=500
    )
    expected = tensors_of(theirs)
    edit_config(
        theirs,
        rope_parameters="REMOVE",
        attention_bias="REMOVE",
        rotary_pct=0.5,
        rotary_emb_base=500,
    )
    prefix = "gpt_neox.layers.{}.attention."
    edit_tensors(
        theirs,
        lambda t: t.update(
            {
                prefix.format(i) + name: torch.ones(4)
                for i in range(2)
                for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
            }
        ),
    )
    made = import_folder(theirs, tmp_path / "ours")
    assert made.notes[0] == (
        "6 tensors that take no part in gpt_neox passed over: gpt_neox.layers.0.attention.bias, .."
    )
    model = checkpoint.read_manifest(made.checkpoint).config.model
    assert (model.rotary_base, model.rotary_fraction, model.parallel_residual) == (500.0, 0.5, True)
    assert compare(made.checkpoint, theirs).ok
    same_bits(tensors_of(export_folder(made.checkpoint, tmp_path / "back").folder), expected)
    edit_config(theirs, rotary_pct="REMOVE", rotary_emb_base="REMOVE")
    found = import_folder(theirs, tmp_path / "usual")
    model = checkpoint.read_manifest(found.checkpoint).config.model
    assert (model.rotary_base, model.rotary_fraction) == (10000.0, 0.25)
    assert compare(found.checkpoint, theirs).ok
    edit_tensors(
        theirs, lambda t: t.update({"lm_head.weight": t.pop("embed_out.weight")})
    )  # the class's own name
    same_bits(
        *(
            checkpoint.load_full(m.checkpoint)[1]
            for m in (found, import_folder(theirs, tmp_path / "newer"))
        )
    )


def test_a_tokenizer_from_before_tokenizer_json(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "stone", "##s", "a", "river", "A"]
    texts = ["Stones a river", "A stone"]
    theirs = make_theirs(tmp_path / "theirs", "bert", **BERT)
    (theirs / "vocab.txt").write_text("\n".join(words) + "\n")
    for lower in (True, False):
        (theirs / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
        made = import_folder(theirs, tmp_path / f"ours-{lower}")
        assert not made.notes
        back = export_folder(made.checkpoint, tmp_path / f"back-{lower}")
        tokenizer = transformers.AutoTokenizer.from_pretrained(back.folder, local_files_only=True)
        expected = transformers.BertTokenizer(str(theirs / "vocab.txt"), do_lower_case=lower)
        assert tokenizer(texts)["input_ids"] == expected(texts)["input_ids"]
        assert (tokenizer("a")["input_ids"] == tokenizer("A")["input_ids"]) is lower
    (theirs / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"vocab\.txt: not a valid vocabulary"):
        import_folder(theirs, tmp_path / "never")

    theirs = make_theirs(tmp_path / "gpt2", "gpt2", **GPT2)
    (theirs / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (theirs / "merges.txt").write_text("#version: 0.2\na b\n")
    import_folder(theirs, tmp_path / "ours-gpt2")
    found = checkpoint.huggingface.tokens.Tokenizer.load(tmp_path / "ours-gpt2" / "tokenizer.json")
    assert (found.encode("abba").tolist(), found.special("<|endoftext|>")) == ([2, 1, 0], 3)


# -- any sizes

ODD = st.integers(1, 7)
GELUS = ["gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"]


@st.composite
def models(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A kind and the keys of its configuration: nothing in them is a round number."""
    kind = draw(st.sampled_from(["gpt2", "llama", "mistral", "gpt_neox", "bert"]))
    kv = draw(st.integers(1, 3))
    heads = kv * draw(st.integers(1, 3)) if kind in ("llama", "mistral") else draw(ODD)
    fraction = draw(st.sampled_from([0.25, 0.5, 1.0])) if kind == "gpt_neox" else 1.0
    hidden = heads * round(2 / fraction) * draw(ODD)
    layers = draw(st.integers(1, 3))
    vocab = draw(st.integers(5, 60))
    length = draw(st.integers(2, 40))
    eps = draw(st.sampled_from([1e-12, 1e-5, 1e-2]))
    tied = draw(st.booleans())
    if kind == "gpt2":
        return kind, {
            "vocab_size": vocab,
            "n_positions": length,
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": heads,
            "n_inner": draw(st.none() | st.integers(1, 50)),
            "layer_norm_epsilon": eps,
            "tie_word_embeddings": tied,
            "activation_function": draw(st.sampled_from(GELUS)),
        }
    sizes = {
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": draw(st.integers(1, 50)),
        "tie_word_embeddings": tied,
    }
    if kind == "bert":
        return kind, sizes | {
            "layer_norm_eps": eps,
            "hidden_act": draw(st.sampled_from(GELUS)),
            "head": draw(st.sampled_from(["ForPreTraining", "ForMaskedLM"])),
        }
    if kind == "gpt_neox":
        return kind, sizes | {
            "layer_norm_eps": eps,
            "use_parallel_residual": draw(st.booleans()),
            "rotary_pct": fraction,
            "rotary_emb_base": draw(st.sampled_from([100, 10000])),
            "hidden_act": draw(st.sampled_from(GELUS)),
        }
    bias = draw(st.booleans())
    more = (
        {"attention_bias": bias, "mlp_bias": bias} if kind == "llama" else {"sliding_window": None}
    )
    theta = draw(st.sampled_from([100.0, 10000.0, 5e5]))
    return kind, sizes | more | {
        "rms_norm_eps": eps,
        "num_key_value_heads": kv,
        "rope_theta": theta,
    }


@pytest.mark.thorough
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models())
def test_any_sizes(made: tuple[str, dict[str, Any]]) -> None:
    kind, sizes = made
    with tempfile.TemporaryDirectory() as root:
        theirs = make_theirs(Path(root) / "theirs", kind, **sizes)
        found = import_folder(theirs, Path(root) / "ours")
        assert compare(found.checkpoint, theirs).ok
        back = export_folder(found.checkpoint, Path(root) / "back")
        assert compare(found.checkpoint, back.folder).ok
