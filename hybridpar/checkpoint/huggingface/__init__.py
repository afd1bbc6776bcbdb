"""Exchange with Hugging Face transformers: GPT-2, LLaMA, Mistral and BERT, from and to any grid.

transformers itself is needed by `compare` alone.
"""

from hybridpar.checkpoint.huggingface.export import Exported, export_folder
from hybridpar.checkpoint.huggingface.load import Imported, import_folder
from hybridpar.checkpoint.huggingface.verify import TOLERANCE, compare

__all__ = ["TOLERANCE", "Exported", "Imported", "compare", "export_folder", "import_folder"]
