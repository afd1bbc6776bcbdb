"""Random changes to files of torch.save: in their bytes, in the zip they are, and in the program
that a pickle is.

A changed pickle is put back into a valid zip, so that it is read and not just refused for its
checksum.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zipfile
from random import Random

from .mutate import VALUES, mutate_bytes

Records = list[tuple[str, bytes]]
_PROGRAM = "data.pkl"
_NUM_OLD = 5
"""Pickles that a file from before torch 1.6 begins with: a number, the protocol, the system, what
was saved, keys."""
_MOST_REPEATED = 50_000
"""Bytes of an operation that is there many times."""
_NAMES = (
    "collections OrderedDict",
    "collections Counter",
    "builtins bytearray",
    "builtins set",
    "builtins complex",
    "_codecs encode",
    "torch Tensor",
    "torch FloatTensor",
    "torch Size",
    "torch device",
    "torch float32",
    "torch uint3",
    "torch FloatStorage",
    "torch.storage TypedStorage",
    "torch.storage UntypedStorage",
    "torch.nn.parameter Parameter",
    "torch.serialization _get_layout",
    "torch.sparse FloatTensor",
    "torch._tensor _rebuild_from_type_v2",
    *(
        f"torch._utils _rebuild_{name}"
        for name in (
            "tensor",
            "tensor_v2",
            "tensor_v3",
            "parameter",
            "parameter_with_state",
            "qtensor",
            "sparse_tensor",
            "meta_tensor_no_storage",
            "nested_tensor",
            "wrapper_subclass",
            "device_tensor_from_numpy",
            "device_tensor_from_cpu_tensor",
        )
    ),
    "argparse Namespace",
    "numpy ndarray",
    "megatron.core.enums ModelType",
    "apex x",
    "\u00e9 \x1b[2J",
    "a" * 300 + " b",
    "builtins exec",
    "os getpid",
    "builtins getattr",
)
_STOP_US = "raise KeyboardInterrupt"
"""Code that runs if `exec` is called: nothing that reads files catches it."""
_SIZES = ((), (0,), (3,), (2, 2), (1,) * 70, (-1,), (2**31 - 1,), (2**62, 4), (2**20, 2**12))


def mutate_pickled(data: bytes, random: Random) -> bytes:
    """A file of torch.save, new or old."""
    if random.random() < 0.2:
        return mutate_bytes(data, random)
    if not data.startswith(b"PK"):
        return _mutate_old(data, random)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    if random.random() < 0.15:
        records = _mutate_records(records, random)
    else:
        records = [
            (name, mutate_program(record, random) if name.endswith(_PROGRAM) else record)
            for name, record in records
        ]
    made = io.BytesIO()
    with zipfile.ZipFile(
        made, "w", zipfile.ZIP_DEFLATED if random.random() < 0.02 else zipfile.ZIP_STORED
    ) as archive:
        for name, record in records:
            archive.writestr(zipfile.ZipInfo(name or "x"), record, archive.compression)
    return made.getvalue()


def _mutate_records(records: Records, random: Random) -> Records:
    """One record changed, removed, doubled, renamed, emptied, or exchanged with another."""
    records, at = list(records), random.randrange(len(records))
    (name, record), other = records[at], random.randrange(len(records))
    what = random.randrange(6)
    if what == 0:
        records[at] = name, mutate_bytes(record, random)
    elif what == 1:
        del records[at]
    elif what == 2:
        records[at] = name + random.choice(("0", "/", "/data.pkl", "\u00e9")), record
    elif what == 3:
        records[at] = name[:-1], record
    elif what == 4:
        records[at] = name, record[: random.randrange(len(record) + 1)]
    else:
        records[at], records[other] = (name, records[other][1]), (records[other][0], record)
    return records


def _mutate_old(data: bytes, random: Random) -> bytes:
    """One of the pickles at the beginning, or the storages behind them."""
    stream = io.BytesIO(data)
    ends = [0]
    for _ in range(_NUM_OLD):
        for _ in pickletools.genops(stream):
            pass
        ends.append(stream.tell())
    at = random.choices(range(_NUM_OLD + 1), (1, 1, 1, 20, 3, 3))[0]
    if at == _NUM_OLD:
        return data[: ends[-1]] + mutate_bytes(data[ends[-1] :], random)
    return (
        data[: ends[at]]
        + mutate_program(data[ends[at] : ends[at + 1]], random)
        + data[ends[at + 1] :]
    )


def mutate_program(program: bytes, random: Random) -> bytes:
    """A pickle: one to three of its operations changed, removed, repeated, exchanged, or preceded
    by others."""
    starts = [at for _, _, at in pickletools.genops(program) if at is not None]
    ends = [*starts[1:], len(program)]
    operations = [program[start:end] for start, end in zip(starts, ends, strict=True)]
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        at, other = (random.randrange(len(operations)) for _ in range(2))
        one = operations[at]
        what = random.randrange(8)
        if what <= 1:
            operations[at] = _near(one, random)
        elif what == 2:
            operations[at] = b""
        elif what == 3:
            operations[at] = one * min(
                random.choice((2, 3, 5000)), 2 + _MOST_REPEATED // (1 + len(one))
            )
        elif what == 4:
            operations[at], operations[other] = operations[other], one
        elif what == 5:
            operations[at] = _anything(random)
        elif what == 6:
            operations[at] = (
                _anything(random)
                + random.choice((b"", b"0", b"\x86", b"R", b"b", b"Q", b"s"))
                + one
            )
        else:
            operations[at] = b"(" * random.choice((1, 4000)) + one
    return b"".join(operations)


def _near(operation: bytes, random: Random) -> bytes:
    """An equal operation on something else."""
    code = operation[:1]
    argument = operation[1:]
    if code in (b"K", b"M", b"J", b"\x8a"):
        return _put(
            random.choice(
                (0, 1, 2, 3, 255, 2**31 - 1, -1, -(2**31), 2**40, 2**63 - 1, 2**64, -(2**80))
            )
        )
    if code == b"c":
        return _name(random)
    if code == b"X":
        return _put(mutate_bytes(argument[4:], random).decode("utf-8", "replace"))
    if code in (b"h", b"q", b"j", b"r"):
        place = random.choice((random.randrange(12), random.randrange(256)))
        return code + (bytes([place]) if len(argument) == 1 else struct.pack("<I", place))
    return mutate_bytes(operation, random)


def _put(value: object) -> bytes:
    """Operations that put a value on the stack."""
    return pickle.dumps(value, 2)[2:-1]


def _name(random: Random) -> bytes:
    return f"c{random.choice(_NAMES)}\n".replace(" ", "\n").encode()


def _anything(random: Random) -> bytes:
    """Operations that leave one more object on the stack: a value, a name, or what a call of it
    makes."""
    what = random.randrange(4)
    if what == 0:
        return _put(random.choice(VALUES))
    if what == 1:
        return _name(random)
    arguments = random.choice(
        (
            random.choice(_SIZES),
            tuple(random.choice(VALUES) for _ in range(random.randrange(4))),
            (_STOP_US,),
            (random.choice(_SIZES), "strided", False),
        )
    )
    call = _name(random) + _put(arguments) + random.choice((b"R", b"R", b"\x81"))
    return call + (
        _put(random.choice(({"a": 1}, {"__class__": 1}, (3,), None, ({}, {"b": 2})))) + b"b"
        if random.random() < 0.3
        else b""
    )
