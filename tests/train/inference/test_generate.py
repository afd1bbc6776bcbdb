"""Text: as transformers has it, the same in a batch and on every grid, in whole characters, beyond
the window."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from checkpoint.exchange import make_theirs
from data import foreign
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train.forked import supervised
from train.runs import run_job, write_config

from hybridpar.checkpoint.huggingface import import_folder
from hybridpar.cli import main
from hybridpar.config import Launch, ModelConfig, from_mapping, load_toml
from hybridpar.data import Tokenizer, train_tokenizer
from hybridpar.errors import CheckpointError, ConfigError, DataError
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.models.build import DTYPES, build_blocks
from hybridpar.nn.matmul import by_float32
from hybridpar.runtime.stage import Stage
from hybridpar.train.inference.decoder import Decoder
from hybridpar.train.inference.generate import (
    TOGETHER,
    Generator,
    Pieces,
    Sampling,
    StopWatch,
    choose,
    inference_dtype,
    penalized,
)
from hybridpar.train.job import train
from hybridpar.train.launching import launch

LENGTH = 24
GREEDY = Sampling(LENGTH, temperature=0.0)
PROMPTS = ("Stone", "River lamp clouding rivers. ", "", "cloud\n" * 7, "x")
MODELS = {
    "gpt2": {"n_positions": 128, "n_embd": 48, "n_layer": 3, "n_head": 4},
    "llama": {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 70,
        "max_position_embeddings": 128,
    },
    "gpt_neox": {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 70,
        "rotary_pct": 0.5,
        "max_position_embeddings": 128,
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = load_toml(write_config(tmp_path_factory.mktemp("run")))
    return train(config, Launch(0, 0, 1, 1)).folder


@pytest.fixture(scope="module", params=list(MODELS))
def imported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A random model of transformers, and what it is here."""
    folder = make_theirs(
        tmp_path_factory.mktemp(request.param),
        request.param,
        vocab_size=320,
        bos_token_id=0,
        eos_token_id=0,
        **MODELS[request.param],
    )
    train_tokenizer(["Stone rivers clouding lamp."], 300).save(folder / "tokenizer.json")
    import_folder(folder, folder / "ours")
    return folder, folder / "ours"


def texts(
    generator: Generator, prompts: Sequence[str], sampling: Sampling, **options: Any
) -> list[str]:
    made = [""] * len(prompts)
    for i, piece in generator.generate_all(prompts, sampling, **options):
        made[i] += piece
    return made


@pytest.mark.thorough(keep=1)
def test_greedy_text_is_that_of_transformers(imported: tuple[Path, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(imported[0]).eval()
    generator = Generator.load(imported[1], print)
    tokenizer = generator.tokenizer
    chosen = []
    generator._choose = note(generator._choose, chosen)
    for prompt in PROMPTS:
        chosen.clear()
        text = "".join(generator.generate(prompt, GREEDY))
        ids = tokenizer.encode_prompt(prompt) or [generator.end]
        suppressed = list(range(tokenizer.vocab_size, 320))  # ids that no token has
        made = theirs.generate(
            torch.tensor([ids]),
            max_new_tokens=LENGTH,
            do_sample=False,
            pad_token_id=0,
            suppress_tokens=suppressed,
        )[0, len(ids) :].tolist()
        assert [token for (token,) in chosen] == made
        assert len(made) == LENGTH or made[-1] == generator.end
        assert text == tokenizer.decode([token for token in made if token != generator.end])


def note(choose: Any, chosen: list[list[int]]) -> Any:
    def noted(*args: Any) -> list[int]:
        chosen.append(choose(*args))
        return chosen[-1]

    return noted


@pytest.mark.thorough(keep=1)
def test_several_prompts_are_each_as_alone(imported: tuple[Path, Path]) -> None:
    generator = Generator.load(imported[1], print)
    for sampling in (GREEDY, Sampling(LENGTH, temperature=1.0, top_k=0, top_p=0.95, seed=3)):
        alone = ["".join(generator.generate(prompt, sampling)) for prompt in PROMPTS]
        assert texts(generator, PROMPTS, sampling) == alone
        assert texts(generator, PROMPTS[::-1], sampling) == alone[::-1]
    many = [f"Stone {i}" for i in range(TOGETHER + 3)]
    assert texts(generator, many, Sampling(5))[-1] == "".join(
        generator.generate(many[-1], Sampling(5))
    )
    first, second = texts(generator, ["Stone", "Stone"], Sampling(30))
    assert first != second


def texts_on_grid(
    folder: Path, tp: int, pp: int, ways: Sequence[Sampling]
) -> tuple[list[list[str]], int, bool]:
    """Results of each rank: the texts, the numbers of its weights, and whether there were
    messages."""
    grid = ProcessGrid(tp=tp, pp=pp)
    generator = Generator.load(folder, print, grid)
    numbers = sum(p.numel() for p in generator.decoder.stage.parameters())
    return [texts(generator, PROMPTS, way) for way in ways], numbers, bool(grid.pp.traffic.calls)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (1, 3), (2, 2)])
def test_a_grid_says_the_same_and_each_rank_reads_its_part(
    imported: tuple[Path, Path], tp: int, pp: int
) -> None:
    generator = Generator.load(imported[1], print)
    whole = sum(p.numel() for p in generator.decoder.stage.parameters())
    ways = (GREEDY, Sampling(LENGTH, temperature=1.0, top_k=20, top_p=0.9, seed=5))
    expected = [texts(generator, PROMPTS, way) for way in ways]
    for made, numbers, sent in run_ranks(texts_on_grid, tp * pp, imported[1], tp, pp, ways):
        assert made == expected
        assert numbers < whole * 0.75
        assert sent == (pp > 1)


@pytest.mark.thorough
def test_choices() -> None:
    def chosen(sampling: Sampling, n: int = 99) -> set[int]:
        logits = torch.tensor([[0.0, 5.0, 4.0, -9.0]])
        return {int(choose(logits, sampling, torch.tensor([(i + 0.5) / n]))) for i in range(n)}

    assert chosen(Sampling(temperature=0.0)) == {1}
    assert chosen(Sampling(temperature=1e-320)) == {1}
    assert chosen(Sampling(top_k=2, temperature=10.0)) == {1, 2}
    assert chosen(Sampling(top_k=0, temperature=100.0)) == {0, 1, 2, 3}
    # of probabilities 0.73, 0.27, 0.005, 0.000001
    assert chosen(Sampling(top_k=0, temperature=1.0, top_p=0.7)) == {1}
    assert chosen(Sampling(top_k=0, temperature=1.0, top_p=0.8)) == {1, 2}
    assert chosen(Sampling(top_k=0, temperature=1.0, top_p=0.998), 9999) == {0, 1, 2}
    for name, value in (
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
    ):
        with pytest.raises(ConfigError, match=name):
            Sampling(**{name: value})
    assert choose(
        torch.tensor([[0.0, float("nan")]]), Sampling(), torch.tensor([0.5])
    ).tolist() == [-1]


def test_tokens_come_as_often_as_they_are_likely() -> None:
    n = 4000
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    made = choose(p.log().expand(n, -1), Sampling(temperature=1.0, top_k=0), uniform)
    torch.testing.assert_close(made.bincount(minlength=4) / n, p, atol=1e-3, rtol=0)
    made = choose(p.log().expand(n, -1), Sampling(temperature=1.0, top_k=3, top_p=0.7), uniform)
    torch.testing.assert_close(
        made.bincount(minlength=4) / n, torch.tensor([0, 0, 3 / 7, 4 / 7]), atol=1e-3, rtol=0
    )


@pytest.mark.thorough
def test_text_depends_on_the_seed_alone(run: Path) -> None:
    generator = Generator.load(run, print)
    texts = [
        "".join(generator.generate("Stone", Sampling(30, seed=seed))) for seed in (1, 1, 2, -1)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    named = Generator.load(run / "checkpoints" / "step_00000006", print)
    assert "".join(named.generate("Stone", Sampling(30, seed=1))) == texts[0]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("room", [0, 5, 40])
def test_a_token_costs_the_same_however_long_the_text(run: Path, room: int) -> None:
    """Each step computes one position; where the window is full, its last half goes on as the
    beginning of another."""
    decoder = Generator.load(run, print).decoder
    window = decoder.model.seq_length
    sizes = []
    forward = decoder._forward
    decoder._forward = lambda batch, caches: (
        sizes.append(tuple(batch["tokens"].shape)),
        forward(batch, caches),
    )[1]
    tokens = list(range(1, 12))
    logits = decoder.start([tokens, [7] * 4], room)
    for token in range(20, 20 + room):
        tokens.append(token)
        logits = decoder.go_on([token, 5])
        seen = (
            len(tokens)
            if len(tokens) <= window
            else window // 2 + 1 + (len(tokens) - window - 1) % (window // 2)
        )
        fresh = (
            Generator.load(run, print).decoder.start([tokens[-seen:]], 0)
            if token % 5 == 0
            else logits[:1]
        )
        torch.testing.assert_close(logits[:1], fresh, atol=1e-5, rtol=1e-5)
    assert sizes[0] == (2, 11)
    anew = [size for size in sizes[1:] if size != (2, 1)]
    assert len(sizes) == 1 + room + len(anew)
    assert set(anew) <= {(1, window // 2)}
    assert bool(anew) == (room > window)


def test_last_window_of_a_long_prompt_counts(run: Path) -> None:
    decoder = Generator.load(run, print).decoder
    tokens = list(range(1, 60))
    window = decoder.model.seq_length
    assert torch.equal(decoder.start([tokens], 5), decoder.start([tokens[-window:]], 5))


def test_pieces_are_whole_characters_and_the_end_token_ends(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_tokenizer(["plain text"], 300)
    ids = [int(i) for i in tokenizer.encode("é→x")]
    assert len(ids) == 6
    generator = Generator(Generator.load(run, print).decoder, tokenizer)
    script = iter([*ids, generator.end, *ids[:3]])
    monkeypatch.setattr(generator, "_choose", lambda *args: [next(script)])
    assert list(generator.generate("", GREEDY)) == ["é", "→", "x"]
    assert list(generator.generate("", Sampling(3, temperature=0.0))) == ["é", "\ufffd"]
    assert list(generator.generate("", Sampling(0))) == []


def test_a_text_ends_at_any_end_that_the_folder_names(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLaMA 3's chat models have two."""
    train_tokenizer(["plain text"], 300).save(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    x, y, first, second = (int(tokenizer.encode(word)[0]) for word in "xyAB")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": tokenizer.word(first)})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [second, first]}))
    generator = Generator(
        Generator.load(run, print).decoder, Tokenizer.load(tmp_path / "tokenizer.json")
    )
    assert generator.end == first
    for end in (first, second):
        script = iter([[x, x], [y, end], [end]])
        monkeypatch.setattr(generator, "_choose", lambda *args, script=script: next(script))
        assert texts(generator, ["a", "b"], GREEDY) == ["xy", "x"]


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(40, temperature=50.0, top_k=0, seed=1),
        Sampling(40, temperature=50.0, top_k=3, top_p=0.9, seed=2),
    ],
)
def test_no_id_is_chosen_that_the_tokenizer_lacks(run: Path, sampling: Sampling) -> None:
    """Neither between its ids nor behind them."""
    words = {"<|endoftext|>": 3, "a": 5, "b": 90, "c": 200}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "a"))
    generator = Generator(Generator.load(run, print).decoder, Tokenizer(inner))
    chosen: list[list[int]] = []
    generator._choose = note(generator._choose, chosen)  # type: ignore[method-assign]
    list(generator.generate_all(["a", "b", "c"], sampling))
    found = {token for step in chosen for token in step}
    assert found <= set(words.values())
    assert len(found) > 1 or sampling is GREEDY


def test_pieces_are_the_text_and_little_is_decoded_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = train_tokenizer(["plain text"], 300)
    text = " → text, é plain" * 20
    longest = 0
    decode = Tokenizer.decode

    def counted(self: Tokenizer, some: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(some))
        return decode(self, some)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    pieces = Pieces(tokenizer, tokenizer.encode("plain").tolist())
    assert "".join(map(pieces.add, tokenizer.encode(text).tolist())) + pieces.rest() == text
    assert longest < 10


def test_a_word_keeps_its_space_behind_the_prompt() -> None:
    tokenizer = Tokenizer(foreign.llama())
    prompt = tokenizer.encode_prompt("The")
    whole = tokenizer.encode_prompt("The cat sat")
    assert whole[: len(prompt)] == prompt
    pieces = Pieces(tokenizer, prompt)
    assert "".join(map(pieces.add, whole[len(prompt) :])) + pieces.rest() == " cat sat"


@pytest.mark.thorough
@pytest.mark.ranks
def test_the_command_says_the_same_on_a_grid(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "generate",
        "--checkpoint",
        str(run),
        "--max_tokens",
        "20",
        "--seed",
        "4",
        "--threads",
        "1",
        "--prompt",
        "Stone",
        "--prompt",
        "River lamp",
        "--json",
    ]

    def ran(*args: str) -> dict[str, Any]:
        code, out = supervised(*command, *args)
        assert code == 0, out
        return json.loads(out.splitlines()[-1])

    alone = ran()
    assert [made["prompt"] for made in alone["texts"]] == ["Stone", "River lamp"]
    assert ran("--ranks", "4", "--parallel.tp", "2", "--parallel.pp", "2") == alone
    out = run_job(2, *command[:-1], "--parallel.pp", "2")
    assert out.endswith(
        "\n\n".join(made["prompt"] + made["text"] for made in alone["texts"]) + "\n"
    )


@pytest.mark.thorough
@pytest.mark.ranks
def test_errors_on_a_grid_are_said_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the rank that says it is later than the others, whose end ends it."""
    part = launch.Job._part

    def part_late(self: launch.Job) -> None:
        part(self)
        time.sleep(0.0 if self.launch.rank else 0.5)

    monkeypatch.setattr(launch.Job, "_part", part_late)

    def said(*args: str) -> str:
        code, out = supervised("generate", "--checkpoint", *args)
        assert code == 1
        return out

    assert said(str(run), "--parallel.tp", "2") == (
        "hybridpar: parallel = 'tp=2 pp=1': tp * pp = 2 does not match the 1 processes; try "
        "--ranks "
        "2\n"
    )
    assert (
        said(str(run / "none"), "--ranks", "2", "--parallel.tp", "2").count(
            "is neither a run folder nor a checkpoint"
        )
        == 1
    )
    assert said(str(run), "--ranks", "3", "--parallel.tp", "3") == (
        "hybridpar: parallel.tp = 3: must be at most num_heads = 2: every rank needs at least "
        "one head; try 2\n"
    )


def test_models_that_cannot_generate(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is neither a run folder nor a checkpoint"):
        Generator.load(tmp_path / "none", print)
    with pytest.raises(CheckpointError, match="has no checkpoints"):
        Generator.load(tmp_path, print)
    bert = write_config(tmp_path)
    bert.write_text(bert.read_text().replace("[model]", '[model]\nkind = "bert"'))
    folder = train(load_toml(bert), Launch(0, 0, 1, 1)).folder
    with pytest.raises(ConfigError, match="only a GPT can generate"):
        Generator.load(folder, print)
    generator = Generator.load(run, print)
    with torch.no_grad():
        generator.decoder.stage.blocks["1"].mlp.up.weight.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="not finite"):
        list(generator.generate("Stone", GREEDY))


@pytest.mark.thorough(keep=1)
def test_a_repetition_penalty_is_that_of_transformers(imported: tuple[Path, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(imported[0]).eval()
    generator = Generator.load(imported[1], print)
    tokenizer = generator.tokenizer
    chosen: list[list[int]] = []
    generator._choose = note(generator._choose, chosen)  # type: ignore[method-assign]
    sampling = replace(GREEDY, repetition_penalty=1.7)
    made = texts(generator, PROMPTS[:2], sampling)
    assert made != texts(generator, PROMPTS[:2], GREEDY)
    for prompt, text in zip(PROMPTS[:2], made, strict=True):
        ids = tokenizer.encode_prompt(prompt)
        found = theirs.generate(
            torch.tensor([ids]),
            max_new_tokens=LENGTH,
            do_sample=False,
            pad_token_id=0,
            repetition_penalty=1.7,
            suppress_tokens=list(range(tokenizer.vocab_size, 320)),
        )[0, len(ids) :].tolist()
        assert text == tokenizer.decode([token for token in found if token != generator.end])


def test_a_text_ends_before_the_first_stop_text(run: Path) -> None:
    generator = Generator.load(run, print)
    sampling = Sampling(40, seed=2)
    prompts = ["Stone", "cloud", "x"]
    whole = texts(generator, prompts, sampling)
    # stop texts that lie within the pieces of several tokens, and one that never comes
    stop = (whole[0][5:9], whole[1][11:12] + whole[1][12:20], "\0never")
    made = texts(generator, prompts, replace(sampling, stop=stop))
    for text, found in zip(whole, made, strict=True):
        ends = [at for one in stop if (at := text.find(one)) >= 0]
        assert found == text[: min(ends, default=len(text))]
    assert made[0] == whole[0][: whole[0].find(stop[0])]


def test_pieces_hold_back_what_may_begin_a_stop_text() -> None:
    watch = StopWatch(("END", "EEN"))
    assert [watch.add(piece) for piece in ("a", "bE", "E", "E", "c", "EN")] == [
        "a",
        "b",
        "E" * 0,
        "E",
        "EEc",
        "",
    ]
    assert watch.rest() == "EN"
    watch = StopWatch(("END", "D?"))
    assert [watch.add(piece) for piece in ("xE", "ND? y", "z")] == ["x", "", ""]
    assert watch.has_ended
    assert watch.rest() == ""


def test_a_run_generates_in_its_own_precision(tmp_path: Path, run: Path) -> None:
    path = write_config(tmp_path)
    config = from_mapping(
        {"train": {"dtype": "fp64", "num_steps": 1}, "parallel": {"dp": 1}}, load_toml(path)
    )
    folder = train(config, Launch(0, 0, 1, 1)).folder
    decoder = Generator.load(folder, print).decoder
    assert {p.dtype for p in decoder.stage.parameters()} == {torch.float64}
    logits = decoder.start([[1, 2, 3]], 2)
    assert logits is not None
    assert logits.dtype == torch.float64
    slow = [d for d in ("bf16", "fp16") if by_float32(torch.empty(0, dtype=DTYPES[d]))]
    for name, dtype in DTYPES.items():
        assert inference_dtype(name) == (torch.float32 if name in slow else dtype)
    assert {p.dtype for p in Generator.load(run, print).decoder.stage.parameters()} == {
        torch.float32
    }


@pytest.mark.thorough
def test_a_prompt_may_be_a_message(tmp_path: Path, run: Path, capsys: Any) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    with pytest.raises(DataError, match="has no chat template"):
        texts(Generator.load(copied, print), ["Stone"], GREEDY, chat=True)
    (copied / "chat_template.jinja").write_text(
        "{% for m in messages %}<|endoftext|>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}> {% endif %}"
    )
    generator = Generator.load(copied, print)
    (made,) = texts(generator, ["Stone"], GREEDY, chat=True)
    ids = [generator.end, *generator.tokenizer.encode("Stone\n> ").tolist()]
    logits = generator.decoder.start([ids], LENGTH)
    assert logits is not None
    first = int(logits[0].argmax())
    assert made.startswith(generator.tokenizer.decode([first]))
    flags = ["--prompt", "Stone", "--chat", "--temperature", "0", "--max_tokens", str(LENGTH)]
    assert main(["generate", "--checkpoint", str(copied), *flags]) == 0
    assert capsys.readouterr().out.strip() == made.strip()


def test_sampling_refuses_penalties_and_empty_stop_texts() -> None:
    for penalty in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="repetition_penalty"):
            Sampling(repetition_penalty=penalty)
    with pytest.raises(ConfigError, match="must have no empty text"):
        Sampling(stop=("a", ""))


class OneDevice(TorchDispatchMode):
    """Operators take tensors of one device, and only copies move them to another."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = {x.device for x in found if x.dim()}
        assert len(devices) < 2 or func is torch.ops.aten._to_copy.default, (func, devices)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", ["learned", "rotary", "window", "grouped", "qk_norm"])
def test_a_device_computes_all_of_a_token_without_a_wait_of_the_host(kind: str) -> None:
    """On a device whose tensors have no values, so that reading one is an error."""
    options: dict[str, Any] = {
        "learned": {},
        "rotary": {"position": "rotary"},
        "window": {"position": "rotary", "window": 5},
        "grouped": {"position": "rotary", "num_kv_heads": 2},
        "qk_norm": {"position": "rotary", "qk_norm": "head"},
    }[kind]
    model = ModelConfig(
        num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=40, **options
    )
    device = torch.device("meta")
    blocks = build_blocks(model, Axis("tp"), range(model.num_blocks), device=device)
    decoder = Decoder(Stage(blocks), model, ProcessGrid())
    with OneDevice():
        logits = [decoder.start([[1, 2, 3], [4, 5, 6]], 13), decoder.go_on([7, 8])]
        decoder.forget([0])
        logits.append(decoder.go_on([9]))
        logits.append(decoder.start([[1, 2, 3], [4]], 20))
        logits += [decoder.go_on([7, 8]) for _ in range(14)]  # beyond the window
        uniform = torch.empty(2, dtype=torch.float64, device=device)
        likely = penalized(logits[-1], [[1, 2], [3]], 1.5)
        chosen = [choose(likely, way, uniform) for way in (GREEDY, Sampling(top_p=0.9))]
    assert [(one.device, one.shape) for one in chosen] == [(device, (2,))] * 2
    for found in logits:
        assert found is not None
        assert found.device == device
        assert found.shape[1] == 40


def test_without_a_gpu_the_option_of_the_command_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["generate", "--checkpoint", "run", "--device", "cuda"]) == 1
    rule = "requires one GPU per process; GPUs on this machine: 0, processes: 1"
    assert capsys.readouterr().err == f"hybridpar: device = 'cuda': {rule}; try cpu\n"
