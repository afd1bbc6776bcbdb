"""Rules of the section [data]."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from hybridpar.config.all_sections import Config
from hybridpar.config.row_names import NAME_RULE, is_name
from hybridpar.errors import Problem


def data(config: Config) -> Iterator[Problem]:
    section = config.data
    yield from _corpus(config)
    yield from _validation_sets(config)
    yield from _packing(config)
    yield from _chat(config)
    if not section.text_key:
        yield Problem("data.text_key", "", "must be the name of a field or column", '"text"')
    if section.split == 0 and not section.valid_sources and config.train.eval_interval:
        rule = (
            "must be above 0 with train.eval_interval > 0, unless data.valid_corpus or "
            "data.valid_sets is set: evaluation needs samples that are not trained on"
        )
        yield Problem("data.split", section.split, rule, "0.02")


def _packing(config: Config) -> Iterator[Problem]:
    packing = config.data.packing
    length = config.data.document_length
    text = config.model.text_format
    if packing == "none":
        if length:
            rule = "has no effect without data.packing"
            yield Problem("data.document_length", length, rule, "0.0")
        return
    if 0 < length < 1:
        yield Problem("data.document_length", length, "must be 0 or at least 1 token", "0.0")
    if text is None:
        rule = "requires model.kind = gpt: a custom model's dataset packs its own samples"
        yield Problem("data.packing", packing, rule, '"none"')
    elif text.kind != "gpt":
        rule = f"requires model.kind = gpt; model.kind is {text.kind}"
        yield Problem("data.packing", packing, rule, '"none"')
    elif packing == "stream" and config.data.format == "chat":
        rule = (
            'not supported with data.format = "chat": rows would cut conversations, and what is '
            "behind a cut would not see its question"
        )
        yield Problem("data.packing", packing, rule, '"best_fit"')


def _chat(config: Config) -> Iterator[Problem]:
    section = config.data
    text = config.model.text_format
    if section.format == "chat" and text is not None and text.kind != "gpt":
        rule = "requires a GPT, which predicts the next token"
        yield Problem("data.format", "chat", rule, '"text"')
    if section.format == "chat" and "stdlib" in section.corpus:
        rule = 'has no conversations, which data.format = "chat" requires'
        yield Problem("data.corpus", list(section.corpus), rule, '["chat.jsonl"]')
    if section.chat_template and section.format != "chat":
        rule = 'has no effect without data.format = "chat"'
        yield Problem("data.chat_template", section.chat_template, rule, '""')


def _corpus(config: Config) -> Iterator[Problem]:
    corpus = list(config.data.corpus)
    weights = list(config.data.weights)
    equal = str([1.0] * len(corpus))
    if not all(corpus):
        yield Problem("data.corpus", corpus, "must not have an empty entry", '["stdlib"]')
    if not corpus:
        rule = "must name at least one file, folder or data set"
        yield Problem("data.corpus", [], rule, '["stdlib"]')
    together = " ".join(corpus)
    if len(corpus) > 1 and Path(together).is_file():
        rule = "the shell has split one file name at its spaces; put the name in quotation marks"
        yield Problem("data.corpus", corpus, rule, f'["{together}"]')
    if weights and len(weights) != len(corpus):
        rule = f"must have {len(corpus)} weights, one for each entry of data.corpus"
        yield Problem("data.weights", weights, rule, equal)
    elif weights and not (min(weights) >= 0 and sum(weights) > 0):
        rule = "must not be negative, and at least one must be above 0"
        yield Problem("data.weights", weights, rule, equal)


def _validation_sets(config: Config) -> Iterator[Problem]:
    section = config.data
    if section.valid_corpus and section.valid_sets:
        sets = {"other": section.valid_corpus, **section.valid_sets}
        named = ", ".join(f"{name} = {json.dumps(sources)}" for name, sources in sets.items())
        yield Problem(
            "data.valid_corpus",
            list(section.valid_corpus),
            "conflicts with data.valid_sets: give this set a name there",
            f"[], and data.valid_sets = {{{named}}}",
        )
    for name, sources in section.valid_sources.items():
        key = f"data.valid_sets.{name}" if name else "data.valid_corpus"
        if both := sorted({*section.corpus} & {*sources} - {""}):
            rule = "must not be in data.corpus too: validation on training data means nothing"
            yield Problem(key, both, rule, "[]")
        if not all(sources) or not sources:
            rule = "must have at least one source, and no empty entry"
            yield Problem(key, list(sources), rule, '["other.txt"]' if name else "[]")
        if name and not is_name(name):
            rule = f"the name of a validation set {NAME_RULE}"
            yield Problem("data.valid_sets", name, rule, '"other"')
