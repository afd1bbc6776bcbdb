"""Conversations as samples, in which the answers alone are learned: one to a row, or packed.

On disk a conversation is a document of a .bin/.idx pair. Its sequences are by turns text that is
not learned and answers; the first may be empty:

    sequences     <|user|>Hi<|assistant|>   Hello<|end|>   <|user|>Bye<|assistant|>   Bye!<|end|>
    learned                                 yes                                       yes

    tokens        <|user|> Hi <|assistant|> Hello <|end|> ..  pad  pad        seq_length of them
    labels         -100   -100    Hello     <|end|> -100  ..  -100 -100

Padding is on the right, so causal attention sees none of it, and it has no labels: it changes
nothing. With data.packing = "best_fit" a conversation is a document of a row (packed_rows.py), and
has the same labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from hybridpar.data.chat_template import split_marks
from hybridpar.data.files.indexed import IndexedDataset, IndexedWriter
from hybridpar.data.files.pieces import Part
from hybridpar.data.sample_rules import IGNORED
from hybridpar.data.tokenizer import Tokenizer
from hybridpar.errors import config_error

CHAT = "chat"
"""Kind of prepared corpora with conversations, and value of data.format."""
_ENCODED_AT_ONCE = 256
_NUM_NAMED = 5


def write_conversations(parts: Iterable[Part], tokenizer: Tokenizer, writer: IndexedWriter) -> None:
    """Encode rendered conversations with marked answers. Raises: DataError."""
    waiting: list[str] = []
    for marked in _documents(parts):
        waiting.append(marked)
        if len(waiting) == _ENCODED_AT_ONCE:
            _write(waiting, tokenizer, writer)
            waiting = []
    _write(waiting, tokenizer, writer)


def _documents(parts: Iterable[Part]) -> Iterator[str]:
    texts: list[str] = []
    for text, ends in parts:
        texts.append(text)
        if ends:
            yield "".join(texts)
            texts = []


def _write(marked: list[str], tokenizer: Tokenizer, writer: IndexedWriter) -> None:
    split = [split_marks(text) for text in marked]
    encoded = tokenizer.encode_rendered([text for text, _ in split])
    for (ids, starts), (_, spans) in zip(encoded, split, strict=True):
        end = 0
        for first, last in spans:
            # a token belongs to the answer in which it begins
            cuts = np.searchsorted(starts, [first, last])
            writer.add(ids[end : cuts[0]])
            writer.end_sequence()
            writer.add(ids[cuts[0] : cuts[1]])
            writer.end_sequence()
            end = int(cuts[1])
        writer.add(ids[end:])
        writer.end_sequence()
        writer.end_document()


class Conversations:
    """Some documents of a prepared corpus, each a conversation with at least one label.

    Conversations that are longer than a sample are cut at its end. If no answer is left, the
    conversation is left out. `notes` has their numbers.

    Args:
        seq_length: Tokens of a sample; one more is a label only.
        documents: First document and end.

    Attributes:
        lengths: Number of tokens of each conversation, at most seq_length. Shapes: [D].
        fingerprint: Identity of the conversations.

    Raises:
        ConfigError: No conversation has an answer within `seq_length`.
    """

    def __init__(self, indexed: IndexedDataset, seq_length: int, documents: tuple[int, int]):
        self.seq_length = seq_length
        self._indexed = indexed
        first, stop = documents
        self._sequences = indexed.documents[first : stop + 1].astype(np.int64)
        starts = indexed.document_starts[first : stop + 1]
        self._num_labels = self._counted(starts)
        self._starts = starts
        self._kept = np.flatnonzero(self._num_labels)
        self._cut = np.flatnonzero(np.diff(starts) > seq_length + 1)
        self._left_out = np.flatnonzero(self._num_labels == 0)
        self._first = first
        if not len(self._kept):
            longest = int(np.diff(starts).max(initial=0))
            raise config_error(
                "model.seq_length",
                seq_length,
                f"must reach an answer of at least one of the {stop - first} conversations of "
                f"{indexed.prefix}, of which the longest has {longest} tokens",
                str(max(longest, seq_length + 1)),
            )
        tokens = np.diff(starts)[self._kept].astype(np.int64)
        self.lengths: NDArray[np.int64] = np.minimum(tokens, seq_length)
        text = f"conversations {indexed.fingerprint} {first} {stop} {seq_length}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]

    def __len__(self) -> int:
        """Number of conversations."""
        return len(self._kept)

    def read(
        self, document: int, start: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens of a conversation, and as labels the tokens of answers that follow each."""
        number = self._kept[document]
        ids = self._indexed.tokens[self._starts[number] : self._starts[number + 1]]
        ids = ids[: stop + 1].astype(np.int64)
        is_answer = self._is_answer(document)[: stop + 1]
        targets = np.append(np.where(is_answer, ids, IGNORED), IGNORED)
        return ids[start:stop], targets[start + 1 : stop + 1]

    def num_labels(self, document: int, start: int, stop: int) -> int:
        """Return how many of these labels count."""
        return int(np.count_nonzero(self._is_answer(document)[start + 1 : stop + 1]))

    def num_all_labels(self, documents: NDArray[np.int64]) -> int:
        """Return how many labels of these conversations count. Shapes: [b]."""
        return int(self._num_labels[self._kept[documents]].sum())

    def notes(self) -> list[str]:
        """Return lines for the user about conversations that are cut or left out."""
        name = self._indexed.prefix
        lines = []
        if len(self._left_out):
            lines.append(
                f"{name}: {len(self._left_out)} conversations have no answer within "
                f"model.seq_length = {self.seq_length} and are left out: "
                f"{self._named(self._left_out)}"
            )
        cut = np.setdiff1d(self._cut, self._left_out)
        if len(cut):
            lines.append(
                f"{name}: {len(cut)} of {len(self)} conversations are longer than "
                f"model.seq_length = {self.seq_length} and are cut: {self._named(cut)}"
            )
        return lines

    def _named(self, documents: NDArray[np.int64]) -> str:
        lengths = np.diff(self._starts)
        named = [
            f"number {self._first + d + 1} ({lengths[d]} tokens)"
            for d in documents[:_NUM_NAMED].tolist()
        ]
        return ", ".join(named) + ", ..." * (len(documents) > _NUM_NAMED)

    def _is_answer(self, document: int) -> NDArray[np.bool_]:
        """Return which tokens of a conversation are of answers. Shapes: [t]."""
        number = self._kept[document]
        first, stop = self._sequences[number : number + 2].tolist()
        sizes = self._indexed.sizes[first:stop].astype(np.int64)
        return np.repeat(np.arange(stop - first) % 2 == 1, sizes)

    def _counted(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many labels count in each conversation. Shapes: starts [D + 1] -> [D]."""
        sequences = self._sequences
        number = len(sequences) - 1
        document = np.repeat(np.arange(number), np.diff(sequences))
        places = np.arange(sequences[0], sequences[-1])
        begins = self._indexed.sequence_starts[places] - starts[document]
        ends = begins + self._indexed.sizes[places]
        # the label of position p is token p + 1, so tokens 1 to seq_length are labels
        labels = np.minimum(ends, self.seq_length + 1) - np.maximum(begins, 1)
        is_answer = (places - sequences[document]) % 2 == 1
        labels = np.where(is_answer, np.maximum(labels, 0), 0)
        return np.bincount(document, labels, minlength=number).astype(np.int64)


class ChatDataset:
    """Samples of one conversation each, as a member of a Blend.

    Args:
        conversations: The conversations.
        padding: Id after the end of a conversation.
    """

    def __init__(self, conversations: Conversations, *, padding: int):
        self._conversations = conversations
        self._padding = padding
        self.seq_length = conversations.seq_length
        text = f"chat {conversations.fingerprint} {padding}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._conversations)

    def batch(
        self, indices: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> dict[str, NDArray[np.int64]]:
        """Return samples by number. Shapes: `indices`, `epochs` [b]; returns `tokens`, `labels`
        [b, s]."""
        conversations = self._conversations
        tokens = np.full((len(indices), self.seq_length), self._padding, np.int64)
        labels = np.full_like(tokens, IGNORED)
        for row, document in enumerate(indices.tolist()):
            n = int(conversations.lengths[document])
            tokens[row, :n], labels[row, :n] = conversations.read(document, 0, n)
        return {"tokens": tokens, "labels": labels}

    def num_targets(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> int:
        """Return how many labels of these samples count."""
        return self._conversations.num_all_labels(indices)


def split_documents(indexed: IndexedDataset, fraction: float) -> tuple[int, int]:
    """Return the number of conversations to train on, and of all; the last `fraction`, at least
    one, is held out unless `fraction` is 0.

    Raises:
        ConfigError: There is only one.
    """
    total = indexed.num_documents
    if fraction == 0:
        return total, total
    cut = total - max(1, round(fraction * total))
    if cut < 1:
        raise config_error(
            "data.split",
            fraction,
            f"leaves none of the {total} conversations of {indexed.prefix} to train on",
            "0 (no validation), or more conversations",
        )
    return cut, total
