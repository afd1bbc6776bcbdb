"""Train GPT and BERT with any mix of tensor, pipeline and data parallelism."""

from pathlib import Path

__version__ = "0.1.0"

# An installed package holds hybridpar/kernels; a plain checkout keeps them at its top level.
_checkout = Path(__file__).parent.parent
if not Path(__file__).with_name("kernels").is_dir() and (_checkout / "csrc").is_dir():
    __path__.append(str(_checkout))
