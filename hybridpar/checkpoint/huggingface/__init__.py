"""Exchange with Hugging Face transformers: GPT-2, LLaMA, Mistral, GPT-NeoX and BERT, from and to
any grid.

Only `compare` requires transformers itself.
"""

from hybridpar.checkpoint.huggingface.adapters import ExportedAdapters, export_adapters
from hybridpar.checkpoint.huggingface.export import Exported, export_folder
from hybridpar.checkpoint.huggingface.import_model import Imported, import_folder
from hybridpar.checkpoint.huggingface.verify import TOLERANCE, Comparison, compare, compare_logits

__all__ = [
    "TOLERANCE",
    "Comparison",
    "Exported",
    "ExportedAdapters",
    "Imported",
    "compare",
    "compare_logits",
    "export_adapters",
    "export_folder",
    "import_folder",
]
