"""Text columns or whole rows of parquet and Arrow files, and folders of Hugging Face `datasets`,
read with pyarrow (the extra [data]).

Source: https://arrow.apache.org/docs/format/Columnar.html; state.json and dataset_dict.json as
`datasets` writes them: state.json lists the Arrow files of its folder, dataset_dict.json the
folders of the splits. Older versions save all rows of a shuffled or filtered dataset, and beside
them the indices of the selected rows.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridpar.errors import DataError, shown
from hybridpar.reading import BoundedReader, errors_as, open_regular, read_json

_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_DATA_FILES = "_data_files"
_INDICES_FILES = ("_indices_data_files", "_indices_files")
_INDICES = "indices"
"""Name of the column in a file of indices."""
_SAVE_AGAIN = "save the dataset again"
_MAGIC = b"ARROW1"
_TRAIN = "train"
_MAX_STATE = 1 << 24
_ROWS = 256
"""Rows of parquet that are read at a time."""


def import_pyarrow(path: Path, what: str) -> Any:
    """Import pyarrow to read `what`.

    Raises:
        DataError: It is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            f"{path}: is {what}, which requires pyarrow: pip install 'hybridpar[data]'"
        ) from None
    return pyarrow


class Row(NamedTuple):
    """A row's number, counted from 1, and its text as UTF-8 bytes, None for null; or all of it, by
    the names of its columns."""

    number: int
    value: Any


class SavedDataset(NamedTuple):
    """The Arrow files of a folder that `datasets` has saved.

    indices: files with the numbers of the selected rows, in order; empty if all rows are selected.
    """

    files: list[Path]
    indices: list[Path]


def read_columns(raw: BoundedReader, path: Path, kind: str, text_key: str | None) -> Iterator[Row]:
    """Yield the texts of a column; without `text_key`, all of each row.

    Raises:
        DataError: The file is damaged, or has no such text column.
    """
    batches = _parquet if kind == "parquet" else _arrow
    number = 0
    with _damage(path, kind):
        for column in batches(raw, path, kind, text_key):
            for value in column:
                number += 1
                yield Row(number, value.as_py())


def read_selected(indices: Path, files: Sequence[Path], text_key: str | None) -> Iterator[Row]:
    """Yield the texts of the rows that a file of indices selects, in its order, or all of these
    rows; they are counted over all `files`.

    The files are memory-mapped, since rows come in any order.

    Raises:
        DataError: A file is damaged, or has no such text column.
    """
    columns: list[Any] = []
    for path in files:
        with _damage(path, "Arrow"):
            columns += _arrow(_mapped(path), path, _kind_of(path), text_key)
    ends = np.cumsum([len(column) for column in columns], dtype=np.int64)
    num_rows = int(ends[-1]) if columns else 0
    with _damage(indices, "Arrow"):
        for rows in _index_batches(indices):
            if rows.size and int(rows.max()) >= num_rows:
                raise DataError(
                    f"{indices}: selects row {int(rows.max()) + 1}, but the data set has "
                    f"{num_rows}; {_SAVE_AGAIN}"
                )
            for row, at in zip(
                rows.tolist(), np.searchsorted(ends, rows, side="right").tolist(), strict=True
            ):
                column = columns[at]
                yield Row(row + 1, column[row - int(ends[at]) + len(column)].as_py())


def _index_batches(path: Path) -> Iterator[NDArray[np.int64]]:
    """Yield the row numbers in a file of indices, counted from 0. Shapes: yields [n]."""
    import pyarrow.types

    schema, batches = _opened(_mapped(path), _kind_of(path))
    if schema.names != [_INDICES] or not pyarrow.types.is_integer(schema.types[0]):
        raise DataError(
            f"{path}: has the columns {shown(schema.names)}; must have one column {_INDICES!r} "
            f"of whole numbers; {_SAVE_AGAIN}"
        )
    for batch in batches:
        column = batch.column(0)
        column.validate(full=True)
        if column.null_count:
            raise DataError(f"{path}: has a null entry; {_SAVE_AGAIN}")
        numbers = column.to_numpy(zero_copy_only=False)
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < 2**63:
            raise DataError(f"{path}: selects row {int(numbers.min()) + 1}; {_SAVE_AGAIN}")
        yield numbers.astype(np.int64)


@contextmanager
def _damage(path: Path, kind: str) -> Iterator[None]:
    """Turn an error of pyarrow into a DataError that names the file."""
    arrow = import_pyarrow(path, kind)
    try:
        yield
    except DataError:
        raise
    except (
        arrow.ArrowException,
        OSError,
        ValueError,
        MemoryError,
        OverflowError,
        KeyError,
        IndexError,
    ) as error:
        raise DataError(
            f"{path}: is damaged {kind} ({str(error) or type(error).__name__})"
        ) from None


def _mapped(path: Path) -> Any:
    """Return a file, memory-mapped read-only, as a file of pyarrow. Raises: DataError."""
    import pyarrow

    with (
        errors_as(DataError, path, "is damaged Arrow"),
        open_regular(path) as file,
    ):  # ValueError: it is empty
        return pyarrow.BufferReader(
            pyarrow.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        )


def _kind_of(path: Path) -> str:
    """Return which of the two formats an Arrow file has. Raises: DataError."""
    with errors_as(DataError, path), open_regular(path) as file:
        return "Arrow" if file.read(len(_MAGIC)) == _MAGIC else "Arrow stream"


def _parquet(file: BoundedReader, path: Path, kind: str, text_key: str | None) -> Iterator[Any]:
    import pyarrow.parquet

    opened = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
    if text_key is None:
        for batch in opened.iter_batches(_ROWS, use_threads=False):
            yield batch.to_struct_array()
        return
    _check_column(opened.schema_arrow, path, kind, text_key)
    for batch in opened.iter_batches(_ROWS, columns=[text_key], use_threads=False):
        yield _as_bytes(batch.column(0))


def _arrow(file: Any, path: Path, kind: str, text_key: str | None) -> Iterator[Any]:
    schema, batches = _opened(file, kind)
    if text_key is None:
        for batch in batches:
            batch.validate(full=True)
            yield batch.to_struct_array()
        return
    number = _check_column(schema, path, kind, text_key)
    for batch in batches:
        column = _as_bytes(batch.column(number))
        column.validate(full=True)
        yield column


def _opened(file: Any, kind: str) -> tuple[Any, Iterable[Any]]:
    """Return the schema of an Arrow file, and its batches of rows."""
    import pyarrow.ipc

    if kind == "Arrow stream":
        stream = pyarrow.ipc.open_stream(file)
        return stream.schema, stream
    opened = pyarrow.ipc.open_file(file)
    return opened.schema, (opened.get_batch(i) for i in range(opened.num_record_batches))


def _as_bytes(column: Any) -> Any:
    """Return a text column as a column of bytes, so that a row that is not UTF-8 does not affect
    the others."""
    import pyarrow
    import pyarrow.types as types

    if types.is_dictionary(column.type):
        return pyarrow.DictionaryArray.from_arrays(
            column.indices, _as_bytes(column.dictionary), safe=False
        )
    plain = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    return column.view(plain.get(column.type) or pyarrow.binary_view())


def _check_column(schema: Any, path: Path, kind: str, text_key: str) -> int:
    """Return the index of the text column. Raises: DataError if it is missing or not text."""
    import pyarrow.types

    text = [field.name for field in schema if _is_text(pyarrow.types, field.type)]
    if schema.names.count(text_key) != 1 or text_key not in text:
        rule = (
            f"has no text column {text_key!r}; set data.text_key to one of {shown(text)}"
            if text
            else (f"has no text column; its columns are {shown(list(schema.names))}")
        )
        raise DataError(f"{path}: is {kind} and {rule}")
    return int(schema.names.index(text_key))


def _is_text(types: Any, kind: Any) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def saved_dataset(folder: Path) -> SavedDataset | None:
    """Return the files of a folder that `datasets` has saved (of its split `train` if it has
    splits); None if the folder is not one.

    Raises:
        DataError: It is damaged, or has splits without `train`.
    """
    splits = folder / _SPLITS
    if splits.is_file():
        names = _names(splits, _plain(splits).get("splits"))
        if _TRAIN not in names:
            rule = (
                f"is a Hugging Face dataset with the splits {shown(names)}; name the folder "
                f"of one split"
            )
            raise DataError(f"{folder}: {rule}")
        folder = folder / _TRAIN
    state = folder / _STATE
    if not state.is_file():
        return None
    found = _plain(state)
    if found.get(_DATA_FILES) is None and not splits.is_file():
        return None  # written by another program
    files = _listed(state, found.get(_DATA_FILES))
    if not files:
        raise DataError(f"{state}: describes a Hugging Face dataset without files")
    return SavedDataset(
        files, _listed(state, next((found[key] for key in _INDICES_FILES if found.get(key)), []))
    )


def _listed(state: Path, found: Any) -> list[Path]:
    """Return the files in an entry of a state.json. Raises: DataError if it is damaged."""
    names = None
    if isinstance(found, list):
        names = [f.get("filename") if isinstance(f, dict) else None for f in found]
    return [state.with_name(name) for name in _names(state, names)]


def _plain(path: Path) -> dict[str, Any]:
    damage = "is not of a Hugging Face dataset"
    with errors_as(DataError, path, damage, failure=damage):
        found = read_json(path, _MAX_STATE)
    return found if isinstance(found, dict) else {}


def _names(path: Path, found: Any) -> list[str]:
    """Return plain file names. Raises: DataError if they are not."""
    if not isinstance(found, list) or not all(
        isinstance(n, str) and n not in ("", ".", "..") and n.isprintable() and Path(n).name == n
        for n in found
    ):
        raise DataError(
            f"{path}: describes a damaged Hugging Face dataset: its files are {shown(found)}, "
            f"which are not names of files"
        )
    return found
