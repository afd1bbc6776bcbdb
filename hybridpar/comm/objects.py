"""Python objects as bytes that run no code when they are read. Ranks exchange them in addition to
tensors.

JSON holds numbers, strings, booleans, None and lists directly. Anything else is an object with one
key, its tag:

    {"tuple": [..]}  {"set": [..]}  {"dict": [[key, value], ..]}  {"bytes": base64}
    {"path": "runs/x"}  {"enum": ["hybridpar.module:Class", value]}
    {"record": ["hybridpar.module:Class", {field: value, ..}]}     a dataclass or a NamedTuple

Only classes of hybridpar that this process has imported are created, so a sender that can reach the
ports of a job cannot make other code run.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

_SCALARS = (bool, int, float, str)


def to_bytes(value: Any) -> bytes:
    """Return `value` as JSON. Raises: TypeError for an object that has no form in JSON."""
    return json.dumps(_plain(value), separators=(",", ":")).encode("ascii")


def from_bytes(data: bytes) -> Any:
    """Return the object that `to_bytes` made `data` from. Raises: ValueError for any other
    bytes."""
    try:
        return _restored(json.loads(data))
    except (KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"an object of another rank cannot be read: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return {"enum": [_class_name(type(value)), _plain(value.value)]}
    if value is None or type(value) in _SCALARS:
        return value
    if isinstance(value, np.generic):  # a number of numpy; some inherit from Python's
        return _plain(value.item())
    if type(value) is list:
        return [_plain(one) for one in value]
    if type(value) is tuple:
        return {"tuple": [_plain(one) for one in value]}
    if type(value) in (set, frozenset):
        return {"set": sorted((_plain(one) for one in value), key=repr)}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(one)] for key, one in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _record(value, value._fields)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _record(value, [field.name for field in dataclasses.fields(value) if field.init])
    raise TypeError(f"{type(value).__name__} cannot be sent to other ranks; see comm/objects.py")


def _record(value: Any, names: Any) -> dict[str, Any]:
    return {
        "record": [_class_name(type(value)), {name: _plain(getattr(value, name)) for name in names}]
    }


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "tuple":
        return tuple(_restored(one) for one in content)
    if tag == "set":
        return {_restored(one) for one in content}
    if tag == "dict":
        return {_restored(key): _restored(one) for key, one in content}
    if tag == "bytes":
        return base64.b64decode(content, validate=True)
    if tag == "path":
        return Path(content)
    name, inside = content
    kind = _known_class(name)
    if tag == "enum" and issubclass(kind, enum.Enum):
        return kind(_restored(inside))
    if tag == "record" and (dataclasses.is_dataclass(kind) or issubclass(kind, tuple)):
        return kind(**{key: _restored(one) for key, one in inside.items()})
    raise ValueError(f"another rank sent an object with the unknown tag {tag!r}")


def _class_name(kind: type) -> str:
    if not _is_ours(kind.__module__):
        raise TypeError(
            f"{kind.__module__}.{kind.__qualname__} is not a class of hybridpar; see "
            f"comm/objects.py"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def _known_class(name: str) -> type:
    """Return the class of hybridpar that has this name, if this process has imported it. Raises:
    ValueError."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module) if _is_ours(module) else None
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not _is_ours(found.__module__):
        raise ValueError(
            f"another rank sent an object of class {name!r}, which is not a class of hybridpar "
            f"known here"
        )
    return found


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "hybridpar"
