"""Operations on local tensors: public functions with shape checks.

registry.py has the table of the code that runs them.
"""

from hybridpar.ops.activation import geglu, gelu, swiglu
from hybridpar.ops.attention import attention, masked_attention
from hybridpar.ops.cross_entropy import cross_entropy
from hybridpar.ops.dropout import dropout
from hybridpar.ops.embedding import embedding
from hybridpar.ops.fp8 import quantize_fp8
from hybridpar.ops.generation import few_rows_linear, next_token_attention
from hybridpar.ops.largest import largest
from hybridpar.ops.norm import add_norm, bias_dropout_add, layer_norm, rms_norm
from hybridpar.ops.quantize import quantize
from hybridpar.ops.rotary import rotary
from hybridpar.ops.sparse import sparse
from hybridpar.ops.split_qkv import split_qkv
from hybridpar.ops.update import optimizer

__all__ = [
    "add_norm",
    "attention",
    "bias_dropout_add",
    "cross_entropy",
    "dropout",
    "embedding",
    "few_rows_linear",
    "geglu",
    "gelu",
    "largest",
    "layer_norm",
    "masked_attention",
    "next_token_attention",
    "optimizer",
    "quantize",
    "quantize_fp8",
    "rms_norm",
    "rotary",
    "sparse",
    "split_qkv",
    "swiglu",
]
