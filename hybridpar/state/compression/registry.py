"""Load compression methods by name; nothing else imports their files.

A file in methods/ defines GRADIENTS (a subclass of `Method`), MESSAGES (a function from the
configuration to a `Codec`), or both; its row in config/compression_methods.py says which.
"""

from __future__ import annotations

import importlib
from typing import Any

from hybridpar.config import Config
from hybridpar.config.compression_methods import METHODS
from hybridpar.state.compression.codec import Codec
from hybridpar.state.compression.method import Method


def gradient_method(name: str) -> type[Method]:
    """Return the class of a value of compression.gradients other than "none"."""
    method: type[Method] = _file(name).GRADIENTS
    return method


def message_codec(name: str, config: Config) -> Codec | None:
    """Create the codec of a value of compression.messages; None for "none", which sends numbers
    uncompressed.
    """
    if name == "none":
        return None
    codec: Codec = _file(name).MESSAGES(config)
    return codec


def _file(name: str) -> Any:
    return importlib.import_module(METHODS[name].module)
