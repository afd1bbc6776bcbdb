"""BERT samples: [CLS] A [SEP] B [SEP], with masked tokens to restore and a question about the two
segments.

    sentence head   A and B                                                                        sentence label
    nsp             B follows A, or (half the time) comes from another document                    1: another document
    sop             A and B follow each other, half the time with places exchanged                 1: exchanged
    none            only A                                                                         -100

A document is cut into windows of whole sentences that fill a sequence; a sample is a window, so an
epoch visits every window once. Each epoch moves all windows of a document by the same share of a
window. Of the two leftovers, before the first window and in the last, the longer one is used.

    windows            | s0 s1 s2 | s3 s4 s5 s6 | s7 s8 |
    moved by half        s0 | s1 s2 s3 | s4 s5 s6 | s7 s8 |       three samples again: s0 is left out

Everything else is drawn again in each epoch from (seed, epoch, sample): a shorter target length (1
in 10), where A ends, B, the ends that are cut off a pair that is too long, the masked places and
their stand-ins.

A pair is two stretches (start, length) of the token file, so a whole micro-batch is built by
arithmetic on arrays. Shape letters: b samples, s sequence.

Source: Devlin et al., "BERT", 2019, section 3.1 and appendix A.2, and its
    create_pretraining_data.py (pairs,
truncation); Lan et al., "ALBERT", 2020, section 3.1 (sop). Differences: the rest of a shortened
sample's window is not used in that epoch, and for sop a window of one sentence is cut between two
tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hybridpar.data.bits import Bits, below, count_heads, derive, root_key
from hybridpar.data.files.indexed import IndexedDataset
from hybridpar.data.tokenizer import BertVocabulary
from hybridpar.errors import DataError, config_error

Head = Literal["nsp", "sop", "none"]
Ints = NDArray[np.int64]
IGNORED = -100
_MASKED = 0.15
_SHORT = 0.1
# of the masked places: up to here [MASK], from there to here a random token
_PUT_MASK = 0.8
_PUT_RANDOM = 0.9
_CHUNK = 1 << 20
# Purposes of draws.
(
    _IS_SHORT,
    _TARGET,
    _PIVOT,
    _CUT,
    _COIN,
    _DOCUMENT,
    _SENTENCE,
    _CUT_A,
    _CUT_B,
    _PLACE,
    _STAND_IN,
    _TOKEN,
) = range(12)
_MOVE = "data.bert.move"


@dataclass(frozen=True)
class _Pairs:
    """Ranges of the token file. Shapes: [b] each; `length_b` is 0 without a second segment."""

    start_a: Ints
    length_a: Ints
    start_b: Ints
    length_b: Ints
    label: Ints


class BertDataset:
    """Sentence pairs of up to `seq_length` tokens, from a token file whose sequences are sentences.

    Args:
        tokens: The split to use, as positions (start, stop) in `indexed.tokens`. Default: all.

    Raises:
        ConfigError: seq_length is too short for a pair.
        DataError: The split has no sample, or only one document for 'nsp'.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        seq_length: int,
        vocabulary: BertVocabulary,
        *,
        seed: int,
        head: Head = "sop",
        tokens: tuple[int, int] | None = None,
    ):
        start, stop = tokens if tokens is not None else (0, indexed.num_tokens)
        self._capacity = seq_length - (2 if head == "none" else 3)
        if self._capacity < 2:
            raise config_error(
                "model.seq_length", seq_length, "too short for a pair of segments", "128"
            )
        self.seq_length = seq_length
        self.head = head
        self.vocabulary = vocabulary
        self._name = indexed.bin_path
        self._tokens = indexed.tokens
        self._key, self._move_key = root_key(seed, "data.bert"), root_key(seed, _MOVE)
        self._sentences, self._documents = _boundaries(indexed, start, stop)
        self._windows = self._cut_windows()
        self._next_windows = np.append(self._windows[1:], len(self._sentences) - 1)
        if not len(self._windows):
            raise DataError(
                f"{indexed.prefix}: a split of {stop - start} tokens has no two tokens of the "
                f"same document"
            )
        if head == "nsp" and len(self._documents) < 3:
            raise DataError(
                f"{indexed.prefix}: next-sentence prediction requires two documents, and this "
                f"split has {len(self._documents) - 1}; model.sentence_head = 'sop' works with one"
            )
        self._is_special = np.zeros(vocabulary.size, np.bool_)
        self._is_special[list(vocabulary.special)] = True
        self._ordinary = np.flatnonzero(~self._is_special)
        text = (
            f"bert {indexed.fingerprint} {start} {stop} {seq_length} {head} {seed} {vocabulary} "
            "moved"
        )
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]

    def __len__(self) -> int:
        """Number of samples in an epoch."""
        return len(self._windows)

    def batch(self, indices: Ints, epochs: Ints) -> dict[str, NDArray[Any]]:
        """Return samples by number, each in its epoch.

        Shapes: `indices`, `epochs` [b]; returns `tokens`, `labels`, `token_types` [b, s] int64,
        `padding_mask` [b, s] bool (True = real token), `sentence_labels` [b] int64.
        """
        keys = derive(self._key, epochs, indices)
        pairs = self._pairs(self._moved(indices, epochs), keys)
        tokens, ordinary = self._assemble(pairs)
        chosen = self._choose(pairs, ordinary, keys)
        labels = np.where(chosen, tokens, IGNORED)
        place = np.arange(self.seq_length)[None, :]
        end_a = pairs.length_a[:, None] + 2
        end = np.where(pairs.length_b > 0, pairs.length_a + pairs.length_b + 3, pairs.length_a + 2)[
            :, None
        ]
        return {
            "tokens": self._replace(tokens, chosen, keys),
            "labels": labels,
            "token_types": ((place >= end_a) & (place < end)).astype(np.int64),
            "padding_mask": place < end,
            "sentence_labels": pairs.label,
        }

    def num_targets(self, indices: Ints, epochs: Ints) -> int:
        """Return the number of labels of these samples that count. Shapes: `indices`, `epochs`
        [b]."""
        keys = derive(self._key, epochs, indices)
        pairs = self._pairs(self._moved(indices, epochs), keys)
        _, ordinary = self._assemble(pairs)
        return int(_num_masked(pairs, ordinary).sum())

    def _cut_windows(self) -> Ints:
        """Return the first sentence of each window of at least two tokens. Shapes: returns
        [windows]."""
        found: list[int] = []
        next_start = 0
        for first in range(0, len(self._sentences) - 1, _CHUNK):
            sentences = np.arange(first, min(first + _CHUNK, len(self._sentences) - 1))
            stops = self._stop(sentences, np.full(len(sentences), self._capacity)).tolist()
            while next_start < first + len(stops):
                found.append(next_start)
                next_start = stops[next_start - first]
        windows = np.array(found, np.int64)
        stops = self._stop(windows, np.full(len(windows), self._capacity))
        return windows[self._sentences[stops] - self._sentences[windows] >= 2]

    def _stop(self, sentences: Ints, num_tokens: Ints) -> Ints:
        """Return the end of a range of sentences that starts at each of these and has
        `num_tokens` tokens, or ends with the document."""
        enough = np.searchsorted(self._sentences, self._sentences[sentences] + num_tokens)
        return np.minimum(enough, self._documents[self._document_of(sentences) + 1])

    def _document_of(self, sentences: Ints) -> Ints:
        return np.searchsorted(self._documents, sentences, side="right") - 1

    def _moved(self, indices: Ints, epochs: Ints) -> tuple[Ints, Ints]:
        """Return each window's first sentence and end in its epoch. Shapes: [b] all.

        At least two sentences of a window stay in it, so it has two tokens.
        """
        document = self._document_of(self._windows[indices])
        begin = self._documents[document]
        end = self._documents[document + 1]
        leading = np.searchsorted(self._windows, begin)
        drawn = derive(self._move_key, epochs, document)

        def move(windows: Ints) -> Ints:
            length = np.minimum(self._next_windows[windows], end) - self._windows[windows]
            return below(drawn, np.maximum(length - 1, 1))

        is_last = self._next_windows[indices] >= end
        several = ~(is_last & (indices == leading))
        first = self._windows[indices] + np.where(several, move(indices), 0)
        following = np.minimum(indices + 1, len(self._windows) - 1)
        stop = np.where(is_last, end, self._windows[following] + move(following))
        before = begin + move(leading)
        swap = is_last & several & (before - begin > end - first)
        return np.where(swap, begin, first), np.where(swap, before, stop)

    def _pairs(self, window: tuple[Ints, Ints], keys: Bits) -> _Pairs:
        """Return the segments of each sample. Shapes: `window`, `keys` [b]."""
        short = _chance(derive(keys, _IS_SHORT)) < _SHORT
        target = np.where(
            short, 2 + below(derive(keys, _TARGET), self._capacity - 1), self._capacity
        )
        first = window[0]
        stop = np.minimum(self._stop(first, target), window[1])
        start = self._sentences[first]
        end = self._sentences[stop]
        if self.head == "none":
            pairs = _Pairs(start, end - start, end, np.zeros_like(end), np.full_like(end, IGNORED))
            return self._truncate(pairs, keys)
        several = stop - first >= 2
        step = 1 + below(derive(keys, _PIVOT), np.maximum(stop - first - 1, 1))
        pivot = self._sentences[first + np.where(several, step, 0)]
        coin = derive(keys, _COIN) >> np.uint64(63) == 1
        if self.head == "nsp":
            coin |= ~several
            pivot = np.where(several, pivot, end)
            other, length = self._elsewhere(first, np.maximum(target - (pivot - start), 1), keys)
            pairs = _Pairs(
                start,
                pivot - start,
                np.where(coin, other, pivot),
                np.where(coin, length, end - pivot),
                coin.astype(np.int64),
            )
        else:
            pivot = np.where(
                several,
                pivot,
                start + 1 + below(derive(keys, _CUT), np.maximum(end - start - 1, 1)),
            )
            head = pivot - start
            tail = end - pivot
            pairs = _Pairs(
                np.where(coin, pivot, start),
                np.where(coin, tail, head),
                np.where(coin, start, pivot),
                np.where(coin, head, tail),
                coin.astype(np.int64),
            )
        return self._truncate(pairs, keys)

    def _elsewhere(self, first: Ints, num_tokens: Ints, keys: Bits) -> tuple[Ints, Ints]:
        """Return start and length of a range of about `num_tokens` tokens in a document other
        than sentence `first`'s."""
        own = self._document_of(first)
        document = below(derive(keys, _DOCUMENT), len(self._documents) - 2)
        document += document >= own
        begin = self._documents[document]
        end = self._documents[document + 1]
        sentence = begin + below(derive(keys, _SENTENCE), end - begin)
        start = self._sentences[sentence]
        return start, self._sentences[self._stop(sentence, num_tokens)] - start

    def _truncate(self, pairs: _Pairs, keys: Bits) -> _Pairs:
        """Drop tokens one by one from the longer segment (the second if equal), each from the
        front or the back."""
        excess = np.maximum(pairs.length_a + pairs.length_b - self._capacity, 0)
        difference = pairs.length_a - pairs.length_b
        level = np.minimum(
            np.abs(difference), excess
        )  # until both are as long, only the longer one loses
        rest = excess - level
        drop_a = np.where(difference > 0, level, 0) + rest // 2
        drop_b = np.where(difference > 0, 0, level) + (rest + 1) // 2
        front_a = count_heads(derive(keys, _CUT_A), drop_a)
        front_b = count_heads(derive(keys, _CUT_B), drop_b)
        return _Pairs(
            pairs.start_a + front_a,
            pairs.length_a - drop_a,
            pairs.start_b + front_b,
            pairs.length_b - drop_b,
            pairs.label,
        )

    def _assemble(self, pairs: _Pairs) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the unmasked sequences, and which of their positions hold ordinary tokens.
        Shapes: returns two of [b, s]."""
        place = np.arange(self.seq_length)[None, :]
        end_a = 1 + pairs.length_a[:, None]
        end_b = end_a + 1 + pairs.length_b[:, None]
        in_a = (place >= 1) & (place < end_a)
        in_b = (place > end_a) & (place < end_b)
        source = np.where(
            in_a, pairs.start_a[:, None] + place - 1, pairs.start_b[:, None] + place - end_a - 1
        )
        ids = self._tokens[np.where(in_a | in_b, source, 0)].astype(np.int64)
        if ids.max(initial=0) >= self.vocabulary.size or ids.min(initial=0) < 0:
            raise DataError(
                f"{self._name}: has token ids from {ids.min()} to {ids.max()}, out of range for "
                f"the tokenizer's {self.vocabulary.size} tokens"
            )
        tokens = np.where(in_a | in_b, ids, self.vocabulary.pad)
        tokens[:, 0] = self.vocabulary.cls
        rows = np.arange(len(tokens))
        tokens[rows, end_a[:, 0]] = self.vocabulary.sep
        pair = pairs.length_b > 0
        tokens[rows[pair], end_b[pair, 0]] = self.vocabulary.sep
        return tokens, (in_a | in_b) & ~self._is_special[tokens]

    def _choose(self, pairs: _Pairs, ordinary: NDArray[np.bool_], keys: Bits) -> NDArray[np.bool_]:
        """Return the positions to mask: the ordinary ones that drew the lowest numbers.

        Shapes: `ordinary` [b, s]; returns [b, s].
        """
        draws = derive(derive(keys, _PLACE)[:, None], np.arange(self.seq_length)[None, :])
        draws = np.where(ordinary, draws >> np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF))
        by_draw = np.argsort(draws, axis=1, kind="stable")
        chosen = np.zeros_like(ordinary)
        first = np.arange(self.seq_length)[None, :] < _num_masked(pairs, ordinary)[:, None]
        np.put_along_axis(chosen, by_draw, first, axis=1)
        return chosen

    def _replace(self, tokens: Ints, chosen: NDArray[np.bool_], keys: Bits) -> Ints:
        """Return the sequences with replacements at the masked positions. Shapes: `tokens`,
        `chosen` [b, s]; returns [b, s]."""
        rows, places = np.nonzero(chosen)
        which = _chance(derive(derive(keys, _STAND_IN)[rows], places))
        drawn = self._ordinary[
            below(derive(derive(keys, _TOKEN)[rows], places), len(self._ordinary))
        ]
        kept = tokens[rows, places]
        masked = tokens.copy()
        drawn_or_kept = np.where(which < _PUT_RANDOM, drawn, kept)
        masked[rows, places] = np.where(which < _PUT_MASK, self.vocabulary.mask, drawn_or_kept)
        return masked


def _num_masked(pairs: _Pairs, ordinary: NDArray[np.bool_]) -> Ints:
    """Return 15 % of a sample's tokens besides [CLS] and [SEP], rounded, and at least one if any
    can be masked. Shapes: [b]."""
    wanted = np.floor((pairs.length_a + pairs.length_b) * _MASKED + 0.5).astype(np.int64)
    return np.minimum(np.maximum(wanted, 1), ordinary.sum(axis=1))


def _chance(bits: Bits) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _distinct(ascending: Ints) -> Ints:
    return ascending[np.append(True, ascending[1:] != ascending[:-1])]


def _boundaries(indexed: IndexedDataset, start: int, stop: int) -> tuple[Ints, Ints]:
    """Return the starts of sentences and documents with any tokens in tokens[start:stop].

    Shapes: returns [S + 1], the token at which each sentence starts, and the end; [D + 1], the
    sentence at which each document starts, and S.
    """
    sentences = _distinct(np.clip(indexed.sequence_starts, start, stop))
    documents = _distinct(np.clip(indexed.document_starts, start, stop))
    return sentences, np.searchsorted(sentences, documents)
