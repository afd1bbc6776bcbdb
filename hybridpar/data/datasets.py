"""From the configuration to streams of samples: prepared corpora, held-out parts, data sets, blends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybridpar.config import DataConfig, ModelConfig
from hybridpar.data.bert import BertDataset
from hybridpar.data.blend import Blend, Dataset
from hybridpar.data.corpus import look_at
from hybridpar.data.gpt import GPTDataset
from hybridpar.data.indexed import IndexedDataset, is_indexed
from hybridpar.data.prepared import Prepared, check_vocab, open_prepared, prepare, prepare_tokenizer
from hybridpar.data.split import Part, split_tokens
from hybridpar.data.tokenizer import Tokenizer
from hybridpar.errors import ConfigError, DataError, Problem, config_error


@dataclass(frozen=True)
class Data:
    """What a run reads. `tokenizer` is None for GPT on .bin/.idx files that came without one."""

    train: Blend
    valid: Blend | None
    """The held-out part, or data.valid_corpus; None where there is neither. The same samples at every evaluation."""
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
    tokenized = {name: open_prepared(_prefix(name)) for name in (*data.corpus, *data.valid_corpus)
                 if is_indexed(_prefix(name))}
    texts = [name for name in data.corpus if name not in tokenized]
    own = [tokenized[name] for name in data.corpus if name in tokenized]
    path = _tokenizer_path(data, own, texts)
    made = _prepare_texts(model, data, texts, Path(folder), path, quiet)
    prepared = [tokenized[name] if name in tokenized else made[name] for name in data.corpus]
    prepared = list(dict.fromkeys(prepared)) if not data.weights else prepared
    tokenizer = Tokenizer.load(path) if path else prepared[0].tokenizer() if texts else None
    valid = _open_valid(model, data, Path(folder), tokenized, path or prepared[0].tokenizer_path, quiet)
    _check(model, [*prepared, *valid], tokenizer, path)
    return _blend(model, data, prepared, valid, _Samples(model, tokenizer, seed))


def _open_valid(model: ModelConfig, data: DataConfig, folder: Path, tokenized: dict[str, Prepared],
                tokenizer: Path | None, quiet: bool) -> list[Prepared]:
    """The corpora of validation, in the tokens of those of training. Raises: as open_data."""
    texts = [name for name in data.valid_corpus if name not in tokenized]
    found = [tokenized[name] for name in data.valid_corpus if name in tokenized]
    if texts:
        if tokenizer is None:
            rule = f"is needed for {texts[0]}, because data.corpus is tokenised already, by an unknown one"
            raise config_error("data.tokenizer", "", rule, "the tokenizer.json that it was made with")
        found.append(prepare(texts, folder, model.vocab_size, kind=model.kind, tokenizer=tokenizer,
                             text_key=data.text_key, quiet=quiet))
    return found


def absent_sources(data: DataConfig) -> list[str]:
    """Corpora and the tokenizer that this machine does not have, or cannot read, each with its key and why."""
    found = []
    for key, names in (("corpus", data.corpus), ("valid_corpus", data.valid_corpus)):
        for name in names:
            try:
                if not is_indexed(_prefix(name)):
                    look_at(name, data.text_key)
            except DataError as error:
                found.append(f"data.{key} = {error}")
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
        one = prepare(texts, folder, model.vocab_size, kind=model.kind, tokenizer=tokenizer, text_key=data.text_key,
                      quiet=quiet)
        return dict.fromkeys(texts, one)
    if tokenizer is None and len(texts) > 1:
        tokenizer = prepare_tokenizer(texts, folder, model.vocab_size, kind=model.kind, text_key=data.text_key,
                                      quiet=quiet)
    return {text: prepare(text, folder, model.vocab_size, kind=model.kind, tokenizer=tokenizer, text_key=data.text_key,
                          quiet=quiet) for text in texts}


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


@dataclass(frozen=True)
class _Samples:
    """How samples are made of tokens."""

    model: ModelConfig
    tokenizer: Tokenizer | None
    seed: int

    def dataset(self, indexed: IndexedDataset, part: Part, *, is_training: bool) -> Dataset:
        model = self.model
        if model.kind == "gpt":
            return GPTDataset(indexed, model.seq_length, part, seed=self.seed if is_training else None)
        assert self.tokenizer is not None
        return BertDataset(indexed, model.seq_length, self.tokenizer.bert(), seed=self.seed, head=model.sentence_head,
                           tokens=part)


def _blend(model: ModelConfig, data: DataConfig, prepared: list[Prepared], validation: list[Prepared],
           samples: _Samples) -> Data:
    train: list[Dataset] = []
    valid: list[Dataset] = []
    for one in prepared:
        indexed = one.open()
        fraction = 0.0 if validation else data.split
        trained, held_out = split_tokens(indexed, fraction, model.seq_length + 1)
        train.append(samples.dataset(indexed, trained, is_training=True))
        if held_out is not None:
            valid.append(samples.dataset(indexed, held_out, is_training=False))
    for one in validation:
        indexed = one.open()
        valid.append(samples.dataset(indexed, (0, indexed.num_tokens), is_training=False))
    weights = () if validation else data.weights
    return Data(Blend(train, data.weights, seed=samples.seed),
                Blend(valid, weights, seed=samples.seed) if valid else None, tuple(prepared), samples.tokenizer)
