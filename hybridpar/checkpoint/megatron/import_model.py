"""Turn a checkpoint of Megatron-LM into one of hybridpar, with its configuration."""

from __future__ import annotations

from pathlib import Path

from hybridpar.checkpoint.huggingface.import_model import Imported, check_shape, make_checkpoint
from hybridpar.checkpoint.huggingface.tokens import TOKENIZER
from hybridpar.checkpoint.megatron.arguments import model_of_arguments, true_vocabulary
from hybridpar.checkpoint.megatron.family import GPT
from hybridpar.checkpoint.megatron.files import MegatronFiles
from hybridpar.data.tokenizer import Tokenizer


def import_megatron(
    source: str | Path, output: str | Path, vocab_size: int | None = None
) -> Imported:
    """Create `output` from the newest iteration, or from the folder of one; see import_folder for
    its contents.

    Args:
        vocab_size: Tokens of the vocabulary without padding; None: as the arguments say, if they
            do.

    Raises:
        CheckpointError: Files are missing or damaged, or do not match each other.
        ConfigError: The arguments describe a model that is not supported, or `output` exists.
    """
    files = MegatronFiles(Path(source))
    path = files.folder / TOKENIZER
    if vocab_size is None and path.is_file():
        vocab_size = Tokenizer.load(path).vocab_size
    size, note = true_vocabulary(files.args, files.rows, vocab_size)
    files.cut_vocabulary(size)
    model = model_of_arguments(files.args, size, is_core=files.is_core)
    check_shape(model, files, GPT.settings)
    return make_checkpoint(files, model, GPT, Path(output), [note] if note else [])
