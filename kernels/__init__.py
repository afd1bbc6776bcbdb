"""Triton kernels. They need only torch, triton and each other; nothing else of hybridpar."""
