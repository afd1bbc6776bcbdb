"""Compression methods, one file each. Only state/compression/registry.py imports them."""
