"""Triton kernels. Each module is complete in itself and needs only torch and triton; nothing of hybridpar."""
