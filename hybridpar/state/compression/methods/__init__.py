"""Compression methods, a file each. Only state/compression/registry.py imports them."""
