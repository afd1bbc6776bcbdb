"""Data: text -> tokens on disk -> samples -> micro-batches.

open_data    config -> prepared corpora, training and validation streams; calls everything below
prepare      corpus.py (formats.py, readers.py, columns.py) -> pieces.py, tokenizer.py ->
             indexed.py: text to a .bin/.idx pair, once, as a stream (prepared.py); bad_records.py:
             what cannot be read
Tokenizer    tokenizer.py, with what the files beside a tokenizer.json say (tokenizer_folder.py)
datasets     gpt.py, bert.py: samples of a part of a pair
ChatDataset  chat.py, chat_template.py: conversations, with loss on their answers
Blend        order.py, blend.py: an endless shuffled stream of samples, from any position
MappedDataset    mapped.py: samples of a custom dataset, in a Blend; sample_rules.py: those for GPT
                 and BERT
StreamedSamples  stream.py: what an iterable of one's own gives, in its order
BatchLoader  the stream dealt out as micro-batches
"""

from hybridpar.data.bert import BertDataset
from hybridpar.data.blend import Blend, Dataset
from hybridpar.data.chat_template import ChatTemplate
from hybridpar.data.datasets import NO_DATASETS, Data, absent_sources, open_data, split_tokens
from hybridpar.data.files.indexed import IndexedDataset, IndexedWriter, token_dtype
from hybridpar.data.gpt import GPTDataset
from hybridpar.data.loader import FROM_THE_START, BatchLoader, DataStart, Samples
from hybridpar.data.order import SampleOrder
from hybridpar.data.prepared import (
    CorpusOptions,
    Prepared,
    check_vocab,
    open_prepared,
    prepare,
    prepare_tokenizer,
)
from hybridpar.data.tokenizer import BertVocabulary, Tokenizer, train_tokenizer

__all__ = [
    "FROM_THE_START",
    "NO_DATASETS",
    "BatchLoader",
    "BertDataset",
    "BertVocabulary",
    "Blend",
    "ChatTemplate",
    "CorpusOptions",
    "Data",
    "DataStart",
    "Dataset",
    "GPTDataset",
    "IndexedDataset",
    "IndexedWriter",
    "Prepared",
    "SampleOrder",
    "Samples",
    "Tokenizer",
    "absent_sources",
    "check_vocab",
    "open_data",
    "open_prepared",
    "prepare",
    "prepare_tokenizer",
    "split_tokens",
    "token_dtype",
    "train_tokenizer",
]
