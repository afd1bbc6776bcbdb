"""Triton kernels: they need torch, triton and each other; nothing of hybridpar."""
