"""Operations on local tensors: public functions with shape checks; registry.py is the table of what runs them."""

from hybridpar.ops.activation import gelu, swiglu
from hybridpar.ops.attention import attention
from hybridpar.ops.dropout import dropout
from hybridpar.ops.norm import layer_norm, rms_norm
from hybridpar.ops.rotary import rotary

__all__ = ["attention", "dropout", "gelu", "layer_norm", "rms_norm", "rotary", "swiglu"]
