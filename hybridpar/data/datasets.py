"""Streams of samples from the configuration: prepared corpora, held-out splits, data sets,
blends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hybridpar.config import Config, DataConfig, ModelConfig, spec_error
from hybridpar.config.row_names import NAME_RULE, is_name
from hybridpar.data.bert import BertDataset
from hybridpar.data.blend import Blend, Dataset
from hybridpar.data.chat import CHAT, ChatDataset, Conversations, split_documents
from hybridpar.data.chat_template import ChatTemplate
from hybridpar.data.corpus import check_source
from hybridpar.data.files.indexed import IndexedDataset, indexed_prefix, is_indexed
from hybridpar.data.gpt import GPTDataset, TokenDocuments
from hybridpar.data.loader import Samples
from hybridpar.data.mapped import MappedDataset, MappedDocuments
from hybridpar.data.packed_rows import PackedDataset
from hybridpar.data.prepared import (
    CorpusOptions,
    Prepared,
    check_vocab,
    open_prepared,
    prepare,
    prepare_tokenizer,
)
from hybridpar.data.stream import StreamedSamples
from hybridpar.data.tokenizer import Tokenizer
from hybridpar.errors import ConfigError, DataError, Problem, config_error, shown

Part = tuple[int, int]
"""A split of a corpus: positions (start, stop) in its tokens."""


NO_DATASETS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Data:
    """The data of a run. `tokenizer` is None for GPT on .bin/.idx files without a tokenizer."""

    train: Samples
    valid: Mapping[str, Samples]
    """Validation sets by name, with the same samples at every evaluation. The held-out split, or
    data.valid_corpus, has the name ""."""
    prepared: tuple[Prepared, ...]
    tokenizer: Tokenizer | None
    notes: tuple[str, ...] = ()
    """Lines for the user, such as about bad records that were left out."""


def open_data(
    config: Config, *, quiet: bool = False, datasets: Mapping[str, Any] = NO_DATASETS
) -> Data:
    """Open the data of a run, after preparing text corpora in its cache folder.

    Without weights, all text is one corpus. Any number of processes may call it at once: on one
    machine, one works and the others wait. A run without evaluations trains on all of a corpus that
    is too small to hold anything out.

    Args:
        config: The configuration. parallel.dp must be resolved, if the data are no corpora.
        quiet: Show no progress.
        datasets: Data sets by split ("train", "valid") that replace the corpora, or a custom
            model's own data sets.

    Raises:
        ConfigError: Corpora, weights, tokenizer and model do not match, or a split is too small for
            a sample.
        DataError: A file is damaged or unreadable.
    """
    text = config.model.text_format
    if datasets or text is None:
        data = _open_datasets(config, datasets)
        path = config.data.tokenizer
        return replace(data, tokenizer=Tokenizer.load(path) if path else None)
    return _blend(text, config, _open_corpora(text, config, quiet))


@dataclass(frozen=True)
class _Corpora:
    """Prepared corpora, and the tokenizer that they share, if it is known.

    Attributes:
        train: Corpora to train on.
        valid: Corpora of each validation set, by its name.
        tokenizer: The tokenizer.
    """

    train: Sequence[Prepared]
    valid: Mapping[str, Sequence[Prepared]]
    tokenizer: Tokenizer | None

    @property
    def all(self) -> list[Prepared]:
        """All corpora."""
        return [*self.train, *chain(*self.valid.values())]


def _open_corpora(text: ModelConfig, config: Config, quiet: bool) -> _Corpora:
    """Open the corpora that the configuration names, and prepare the ones that are text."""
    data = config.data
    folder = config.cache_folder
    vocab_size = text.vocab_size
    sources = data.valid_sources
    tokenized = {
        name: open_prepared(indexed_prefix(name))
        for name in (*data.corpus, *chain(*sources.values()))
        if is_indexed(indexed_prefix(name))
    }
    texts, own = _parted(data.corpus, tokenized)
    path = (
        Path(data.tokenizer)
        if data.tokenizer
        else next((p.tokenizer_path for p in own if p.tokenizer_path), None)
    )
    if path is None and own and texts:
        raise _tokenizer_needed(texts[0], str(own[0].prefix))
    chat = _chat_template(data, path)
    options = CorpusOptions(text.kind, data.text_key, on_bad_record=data.on_bad_record, chat=chat)

    def made_of(names: str | Sequence[str], tokenizer: Path | None) -> Prepared:
        return prepare(names, folder, vocab_size, tokenizer=tokenizer, options=options, quiet=quiet)

    made: dict[str, Prepared] = {}
    if data.weights:
        shared = path
        if path is None and len(texts) > 1:
            shared = prepare_tokenizer(texts, folder, vocab_size, options=options, quiet=quiet)
        made = {name: made_of(name, shared) for name in texts}
    elif texts:
        made = dict.fromkeys(texts, made_of(texts, path))
    train = [tokenized[name] if name in tokenized else made[name] for name in data.corpus]
    train = train if data.weights else list(dict.fromkeys(train))
    tokenizer = None
    if path:
        tokenizer = Tokenizer.load(path)
        tokenizer = tokenizer.with_chat_template(chat.text) if chat else tokenizer
    elif texts:
        tokenizer = train[0].tokenizer()
    valid: dict[str, list[Prepared]] = {}
    for name, of_set in sources.items():
        texts, valid[name] = _parted(of_set, tokenized)
        if texts:
            used = path or train[0].tokenizer_path
            if used is None:
                raise _tokenizer_needed(texts[0], "data.corpus")
            valid[name].append(made_of(texts, used))
    corpora = _Corpora(train, valid, tokenizer)
    _check(config, corpora, path)
    return corpora


def _chat_template(data: DataConfig, tokenizer: Path | None) -> ChatTemplate | None:
    """Return the template of conversations; None if the corpora are texts.

    Raises:
        ConfigError: There is no tokenizer.
        DataError: There is no template, or it is damaged.
    """
    if data.format != CHAT:
        return None
    if tokenizer is None:
        raise config_error(
            "data.tokenizer",
            "",
            'must be set with data.format = "chat": the tokenizer has the special tokens of the '
            "chat template",
            "the tokenizer.json of the model",
        )
    return ChatTemplate.of(Tokenizer.load(tokenizer), data.chat_template)


def _open_datasets(config: Config, datasets: Mapping[str, Any]) -> Data:
    """Open data sets that are given, or the custom model's own."""
    model = config.model
    found = {
        part: datasets[part] if part in datasets else model.dataset(part)
        for part in ("train", "valid")
    }
    train = None if found["train"] is None else _samples_of(config, found["train"], "train")
    sets = found["valid"] if isinstance(found["valid"], Mapping) else {"": found["valid"]}
    valid: dict[str, Samples] = {}
    for name, dataset in sets.items():
        if isinstance(found["valid"], Mapping) and not is_name(name):
            raise config_error(
                "datasets",
                name,
                f"the name of a validation set {NAME_RULE}",
                '{"train": .., "valid": {"wiki": .., "code": ..}}',
            )
        if dataset is not None:
            valid[name] = _samples_of(config, dataset, f"valid/{name}" if name else "valid")
    if train is None and model.text_format is not None:
        raise config_error(
            "datasets",
            sorted(datasets),
            'must have training samples under "train"',
            '{"train": samples, "valid": None}',
        )
    if train is None:
        rule = 'dataset("train") must return training samples; it returns None'
        raise spec_error(model, rule, "a dataset of dicts of arrays")
    return Data(train, valid, (), None)


def _samples_of(config: Config, dataset: Any, part: str) -> Samples:
    """Return the samples of a data set. A stream keeps two batches in memory."""
    model = config.model
    packing = config.data.packing
    if isinstance(dataset, Mapping):
        names = shown(sorted(map(str, dataset)))
        raise DataError(
            f"dataset({part!r}) of {model.kind} must be a list of samples, each a dict of "
            f"arrays; it is a dict of {names}"
        )
    is_mapped = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if packing != "none":
        if not is_mapped or model.text_format is None:
            rule = (
                f"requires a map-style dataset (len(d), d[i]); dataset({part!r}) is a "
                f"{type(dataset).__name__}"
            )
            raise config_error("data.packing", packing, rule, '"none"')
        documents = MappedDocuments(model.text_format, dataset, part)
        rows = PackedDataset(documents, model.text_format.seq_length, packing)
        return Blend([rows], seed=config.train.seed)
    if is_mapped:
        return Blend([MappedDataset(model, dataset, part)], seed=config.train.seed)
    if callable(dataset) or hasattr(dataset, "__iter__"):
        return StreamedSamples(model, dataset, part, 2 * config.global_batch_size)
    raise DataError(
        f"dataset({part!r}) of {model.kind} must be a map-style dataset (len(d), d[i]), an "
        f"iterable, or a function of the first sample's number; it is a {type(dataset).__name__}"
    )


def _parted(
    names: Sequence[str], tokenized: Mapping[str, Prepared]
) -> tuple[list[str], list[Prepared]]:
    """Return the corpora that are text, and the ones that are tokenized already."""
    return [n for n in names if n not in tokenized], [tokenized[n] for n in names if n in tokenized]


def _tokenizer_needed(text: str, tokenized: str) -> ConfigError:
    rule = (
        f"must be set for {text}, because {tokenized} is tokenized already, with an unknown "
        f"tokenizer"
    )
    return config_error("data.tokenizer", "", rule, "the tokenizer.json that it was made with")


def split_tokens(
    indexed: IndexedDataset, fraction: float, min_tokens: int
) -> tuple[Part, Part | None]:
    """Return the positions (start, stop) of the training split, and of the last `fraction` of the
    tokens (None if 0), to hold out.

    The cut is between documents if the held-out split then has half to twice the requested length,
    else between sequences, else (if the corpus is one long text) anywhere. It depends on the index
    only.

    Raises:
        ConfigError: A split would have fewer than `min_tokens`.
    """
    total = indexed.num_tokens
    if fraction == 0:
        return (0, total), None
    wanted = fraction * total
    cut = round(total - wanted)
    for places in (indexed.document_starts, indexed.sequence_starts):
        right = int(np.searchsorted(places, cut))
        near = min(
            (int(p) for p in places[max(right - 1, 0) : right + 1]), key=lambda p: abs(p - cut)
        )
        if wanted / 2 <= total - near <= 2 * wanted and 0 < near < total:
            cut = near
            break
    if min(cut, total - cut) < min_tokens:
        works = math.ceil(min_tokens / total * 2e4) / 1e4
        rule = (
            f"splits {indexed.prefix} into {cut} and {total - cut} tokens, but a sample "
            f"requires {min_tokens}"
        )
        better = str(works) if works < 0.5 else "0 (no validation), or more text"
        if total < min_tokens:  # not even without a split
            better = "more text, or a smaller model.seq_length"
        raise config_error("data.split", fraction, rule, better)
    return (0, cut), (cut, total)


def absent_sources(data: DataConfig) -> list[str]:
    """Return the corpora, the tokenizer and the template that this machine does not have or cannot read, each
    with its key and the reason."""
    found = []
    sets = {f"valid_sets.{name}": sources for name, sources in data.valid_sets.items()}
    for key, names in {"corpus": data.corpus, "valid_corpus": data.valid_corpus, **sets}.items():
        for name in names:
            try:
                if not is_indexed(indexed_prefix(name)):
                    check_source(name, data.text_key)
            except DataError as error:
                found.append(f"data.{key} = {error}")
    for key in ("tokenizer", "chat_template"):
        if (path := getattr(data, key)) and not Path(path).is_file():
            found.append(f"data.{key} = {path}: does not exist")
    return found


def _check(config: Config, corpora: _Corpora, used: Path | None) -> None:
    """Check that corpora, their tokenizer (from the file `used`) and model match.

    Raises:
        ConfigError: Names everything that does not.
    """
    model = config.model.text_format
    assert model is not None
    expected = CHAT if config.data.format == CHAT else model.kind
    tokenizer = corpora.tokenizer
    problems: list[Problem] = []
    for one in corpora.all:
        try:
            check_vocab(one, model.vocab_size)
        except ConfigError as error:
            problems.extend(error.problems)
        if one.kind not in (expected, *[""] * (expected != CHAT)):
            of = f"was prepared for {one.kind}" if one.kind else "says not what is an answer"
            rule = f"{of}, which does not match this {expected}"
            problems.append(Problem("data.corpus", str(one.prefix), rule, "preparing it again"))
        if (
            one.tokenizer_path
            and tokenizer
            and one.tokenizer().fingerprint != tokenizer.fingerprint
        ):
            rule = f"does not match the tokenizer that {one.prefix} was made with"
            problems.append(Problem("data.tokenizer", str(used), rule, str(one.tokenizer_path)))
    if model.kind == "bert" and tokenizer is None:
        rule = (
            "must be set: BERT masks tokens, and .bin/.idx files do not say which tokens are "
            "special"
        )
        problems.append(
            Problem("data.tokenizer", "", rule, "the tokenizer.json that they were made with")
        )
    if problems:
        raise ConfigError(*problems)


def _blend(model: ModelConfig, config: Config, corpora: _Corpora) -> Data:
    """Split the corpora into training and validation samples, and blend them."""
    tokenizer = corpora.tokenizer
    seed = config.train.seed
    weights = config.data.weights
    packing = config.data.packing

    if config.data.format == CHAT:
        return _blend_chats(config, corpora)

    def dataset(indexed: IndexedDataset, part: Part, order_seed: int | None) -> Dataset:
        if model.kind == "gpt" and packing == "best_fit":
            return PackedDataset(TokenDocuments(indexed, part), model.seq_length, packing)
        if model.kind == "gpt":
            return GPTDataset(
                indexed, model.seq_length, part, seed=order_seed, packed=packing == "stream"
            )
        assert tokenizer is not None
        return BertDataset(
            indexed,
            model.seq_length,
            tokenizer.bert(),
            seed=seed,
            head=model.sentence_head,
            tokens=part,
        )

    train: list[Dataset] = []
    held_out: list[Dataset] = []
    fraction = 0.0 if corpora.valid else config.data.split
    for indexed in (one.open() for one in corpora.train):
        try:
            trained, part = split_tokens(indexed, fraction, model.seq_length + 1)
        except ConfigError:
            if config.train.eval_interval:
                raise
            trained = (0, indexed.num_tokens)
            part = None
        train.append(dataset(indexed, trained, seed))
        if part is not None:
            held_out.append(dataset(indexed, part, None))
    valid = {"": Blend(held_out, weights, seed=seed)} if held_out else {}
    for name, of_set in corpora.valid.items():
        texts = [one.open() for one in of_set]
        valid[name] = Blend(
            [dataset(text, (0, text.num_tokens), None) for text in texts], (), seed=seed
        )
    notes = (line for one in dict.fromkeys(corpora.all) for line in one.notes())
    return Data(
        Blend(train, weights, seed=seed), valid, tuple(corpora.train), tokenizer, tuple(notes)
    )


def _blend_chats(config: Config, corpora: _Corpora) -> Data:
    """Split conversations into training and validation samples, and blend them."""
    tokenizer = corpora.tokenizer
    seed = config.train.seed
    assert tokenizer is not None
    pad = tokenizer.own("pad_token")
    padding = tokenizer.end if pad is None else pad
    notes: list[str] = []

    def samples(corpus: Prepared, first: int, stop: int) -> Dataset:
        found = Conversations(corpus.open(), config.model.tokens_per_sample, (first, stop))
        notes.extend(found.notes())
        if config.data.packing == "best_fit":
            return PackedDataset(found, found.seq_length, "best_fit")
        return ChatDataset(found, padding=padding)

    train: list[Dataset] = []
    held_out: list[Dataset] = []
    fraction = 0.0 if corpora.valid else config.data.split
    for corpus in corpora.train:
        may_hold_out = corpus.num_documents > 1 or config.train.eval_interval
        cut, total = split_documents(corpus.open(), fraction if may_hold_out else 0.0)
        train.append(samples(corpus, 0, cut))
        if cut < total:
            held_out.append(samples(corpus, cut, total))
    valid = {"": Blend(held_out, config.data.weights, seed=seed)} if held_out else {}
    for name, of_set in corpora.valid.items():
        valid[name] = Blend([samples(one, 0, one.num_documents) for one in of_set], (), seed=seed)
    bad = [line for one in dict.fromkeys(corpora.all) for line in one.notes()]
    return Data(
        Blend(train, config.data.weights, seed=seed),
        valid,
        tuple(corpora.train),
        tokenizer,
        (*bad, *notes),
    )
