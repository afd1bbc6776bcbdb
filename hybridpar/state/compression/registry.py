"""Loads compression methods by name; nothing else imports their files.

A file of methods/ has GRADIENTS, its `Method`, or MESSAGES, a function of the configuration that
makes its `Codec`, or both, as its row in config/compression_methods.py says.
"""

from __future__ import annotations

import importlib
from typing import Any

from hybridpar.config import Config
from hybridpar.config.compression_methods import METHODS
from hybridpar.state.compression.codec import Codec
from hybridpar.state.compression.method import Method


def gradient_method(name: str) -> type[Method]:
    """The class of a value of compression.gradients, other than "none"."""
    method: type[Method] = _file(name).GRADIENTS
    return method


def message_codec(name: str, config: Config) -> Codec | None:
    """Make the codec of a value of compression.messages; None for "none": numbers travel as they
    are."""
    if name == "none":
        return None
    codec: Codec = _file(name).MESSAGES(config)
    return codec


def _file(name: str) -> Any:
    return importlib.import_module(METHODS[name].module)
