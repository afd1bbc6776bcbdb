"""Makes a checkpoint, with its configuration, of one that Megatron-LM wrote."""

from __future__ import annotations

from pathlib import Path

from hybridpar.checkpoint.huggingface.import_model import Imported, check_sizes, make_checkpoint
from hybridpar.checkpoint.huggingface.tokens import TOKENIZER
from hybridpar.checkpoint.megatron.arguments import model_of_arguments, true_vocabulary
from hybridpar.checkpoint.megatron.family import GPT
from hybridpar.checkpoint.megatron.files import MegatronFiles
from hybridpar.data.tokenizer import Tokenizer


def import_megatron(
    source: str | Path, output: str | Path, vocab_size: int | None = None
) -> Imported:
    """Makes `output` of the newest iteration, or of the folder of one; see import_folder for what
    it holds.

    vocab_size: tokens of the vocabulary without its padding; else by the arguments, where they say
    it.
    Raises: CheckpointError for files that are missing, damaged or do not fit each other;
        ConfigError for what the
    arguments ask of a model that we do not have, or where `output` is there already.
    """
    files = MegatronFiles(Path(source))
    path = files.folder / TOKENIZER
    if vocab_size is None and path.is_file():
        vocab_size = Tokenizer.load(path).vocab_size
    size, note = true_vocabulary(files.args, files.rows, vocab_size)
    files.cut_vocabulary(size)
    model = model_of_arguments(files.args, size, is_core=files.is_core)
    check_sizes(model, files, GPT.settings)
    return make_checkpoint(files, model, GPT, Path(output), [note] if note else [])
