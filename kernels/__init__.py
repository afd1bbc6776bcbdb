"""Triton kernels: they need torch, triton and each other; nothing of hybridpar.

A module's OPERATORS are the functions that become operators of a library, and the arguments that
each writes.
"""
