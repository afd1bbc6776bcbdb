"""From the configuration to streams of samples: prepared corpora, held-out parts, data sets, blends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybridpar.config import DataConfig, ModelConfig
from hybridpar.data.bert import BertDataset
from hybridpar.data.blend import Blend, Dataset
from hybridpar.data.corpus import source_files
from hybridpar.data.gpt import GPTDataset
from hybridpar.data.indexed import is_indexed
from hybridpar.data.prepared import Prepared, check_vocab, open_prepared, prepare, prepare_tokenizer
from hybridpar.data.split import Part, split_tokens
from hybridpar.data.tokenizer import Tokenizer
from hybridpar.errors import ConfigError, DataError, Problem, config_error


@dataclass(frozen=True)
class Data:
    """What a run reads. `tokenizer` is None for GPT on .bin/.idx files that came without one."""

    train: Blend
    valid: Blend | None
    """The held-out part; None where data.split is 0."""
    prepared: tuple[Prepared, ...]
    tokenizer: Tokenizer | None


def open_data(model: ModelConfig, data: DataConfig, folder: str | Path, *, seed: int, quiet: bool = False) -> Data:
    """Opens the corpora, after preparing in `folder` those that are text; without weights, all text is one corpus.

    Any number of processes may call it at once: on one machine one works and the others wait for it.

    Raises: ConfigError if corpora, weights, tokenizer and model do not go together, or a part of a corpus is too small
    for a sample; DataError for files that are damaged or unreadable.
    """
    if data.weights and len(data.weights) != len(data.corpus):
        rule = f"must have one weight for each of {len(data.corpus)} corpora"
        raise config_error("data.weights", data.weights, rule, str([1.0] * len(data.corpus)))
    if not data.corpus:
        raise config_error("data.corpus", data.corpus, "names no corpus", '["stdlib"]')
    tokenized = {name: open_prepared(_prefix(name)) for name in data.corpus if is_indexed(_prefix(name))}
    texts = [name for name in data.corpus if name not in tokenized]
    path = _tokenizer_path(data, list(tokenized.values()), texts)
    made = _prepare_texts(model, data, texts, Path(folder), path, quiet)
    prepared = [tokenized[name] if name in tokenized else made[name] for name in data.corpus]
    prepared = list(dict.fromkeys(prepared)) if not data.weights else prepared
    tokenizer = Tokenizer.load(path) if path else prepared[0].tokenizer() if texts else None
    _check(model, prepared, tokenizer, path)
    return _blend(model, data, prepared, tokenizer, seed)


def absent_sources(data: DataConfig) -> list[str]:
    """Corpora and the tokenizer that do not exist on this machine, each with its key and why."""
    found = []
    for name in data.corpus:
        try:
            if not is_indexed(_prefix(name)):
                source_files(name)
        except DataError as error:
            found.append(f"data.corpus = {error}")
    if data.tokenizer and not Path(data.tokenizer).is_file():
        found.append(f"data.tokenizer = {data.tokenizer}: does not exist")
    return found


def _prefix(name: str) -> str:
    return name[:-4] if name.endswith((".bin", ".idx")) else name


def _tokenizer_path(data: DataConfig, tokenized: list[Prepared], texts: list[str]) -> Path | None:
    """The tokenizer that the user names, or that came with a tokenised corpus; None: to be trained, or unknown."""
    if data.tokenizer:
        return Path(data.tokenizer)
    for prepared in tokenized:
        if prepared.tokenizer_path is not None:
            return prepared.tokenizer_path
    if tokenized and texts:
        rule = f"is needed for {texts[0]}, because {tokenized[0].prefix} is tokenised already, by an unknown one"
        raise config_error("data.tokenizer", "", rule, "the tokenizer.json that it was made with")
    return None


def _prepare_texts(model: ModelConfig, data: DataConfig, texts: list[str], folder: Path, tokenizer: Path | None,
                   quiet: bool) -> dict[str, Prepared]:
    if not texts:
        return {}
    if not data.weights:
        one = prepare(texts, folder, model.vocab_size, kind=model.kind, tokenizer=tokenizer, quiet=quiet)
        return dict.fromkeys(texts, one)
    if tokenizer is None and len(texts) > 1:
        tokenizer = prepare_tokenizer(texts, folder, model.vocab_size, kind=model.kind, quiet=quiet)
    return {text: prepare(text, folder, model.vocab_size, kind=model.kind, tokenizer=tokenizer, quiet=quiet)
            for text in texts}


def _check(model: ModelConfig, prepared: list[Prepared], tokenizer: Tokenizer | None, used: Path | None) -> None:
    """Raises: ConfigError with all that does not go together."""
    problems: list[Problem] = []
    for one in prepared:
        try:
            check_vocab(one, model.vocab_size)
        except ConfigError as error:
            problems.extend(error.problems)
        if one.kind not in ("", model.kind):
            rule = f"was prepared for {one.kind}, this is {model.kind}"
            problems.append(Problem("data.corpus", str(one.prefix), rule, "preparing it again"))
        if one.tokenizer_path and tokenizer and one.tokenizer().fingerprint != tokenizer.fingerprint:
            rule = f"is not the tokenizer that {one.prefix} was made with"
            problems.append(Problem("data.tokenizer", str(used), rule, str(one.tokenizer_path)))
    if model.kind == "bert" and tokenizer is None:
        rule = "is needed: BERT masks tokens, and .bin/.idx files do not say which are special"
        problems.append(Problem("data.tokenizer", "", rule, "the tokenizer.json that they were made with"))
    if problems:
        raise ConfigError(*problems)


def _blend(model: ModelConfig, data: DataConfig, prepared: list[Prepared], tokenizer: Tokenizer | None,
           seed: int) -> Data:
    train: list[Dataset] = []
    valid: list[Dataset] = []
    for one in prepared:
        indexed = one.open()

        def dataset(part: Part, indexed=indexed) -> Dataset:
            if model.kind == "gpt":
                return GPTDataset(indexed, model.seq_length, part)
            assert tokenizer is not None
            return BertDataset(indexed, model.seq_length, tokenizer.bert(), seed=seed, head=model.sentence_head,
                               tokens=part)

        parts = split_tokens(indexed, data.split, model.seq_length + 1)
        train.append(dataset(parts[0]))
        if parts[1] is not None:
            valid.append(dataset(parts[1]))
    return Data(Blend(train, data.weights, seed=seed), Blend(valid, data.weights, seed=seed) if valid else None,
                tuple(prepared), tokenizer)
