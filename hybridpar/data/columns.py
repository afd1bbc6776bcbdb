"""Text columns of parquet and Arrow files, and folders of Hugging Face `datasets`, through pyarrow (the extra [data]).

Source: https://arrow.apache.org/docs/format/Columnar.html; state.json and dataset_dict.json as `datasets` saves them to
disk: the one names the Arrow files of its folder, the other the folders beside it, one for each part.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridpar.errors import DataError, shown
from hybridpar.reading import BoundedReader, errors_as, read_json

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_TRAIN = "train"
_MAX_STATE = 1 << 24
_ROWS = 256
"""Rows of parquet that are taken at a time."""


def import_pyarrow(path: Path, what: str) -> Any:
    """Raises: DataError if there is none."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"{path}: is {what}, which is read with pyarrow: pip install 'hybridpar[data]'") from None
    return pyarrow


def read_columns(raw: BoundedReader, path: Path, kind: str, text_key: str) -> Iterator[str]:
    """The texts of a column; null is no text.

    Raises: DataError if the file is damaged, or has no such column of text.
    """
    arrow = import_pyarrow(path, kind)
    batches = _parquet if kind == "parquet" else _arrow
    try:
        for column in batches(raw, path, kind, text_key):
            for value in column:
                text = value.as_py()
                if text is not None:
                    yield text
    except DataError:
        raise
    except (arrow.ArrowException, OSError, ValueError, MemoryError, OverflowError, KeyError, IndexError) as error:
        raise DataError(f"{path}: is damaged {kind} ({str(error) or type(error).__name__})") from None


def _parquet(file: BoundedReader, path: Path, kind: str, text_key: str) -> Iterator[Any]:
    import pyarrow.parquet

    opened = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
    _check_column(opened.schema_arrow, path, kind, text_key)
    for batch in opened.iter_batches(_ROWS, columns=[text_key], use_threads=False):
        yield batch.column(0)


def _arrow(file: BoundedReader, path: Path, kind: str, text_key: str) -> Iterator[Any]:
    import pyarrow.ipc

    if kind == "Arrow stream":
        batches = opened = pyarrow.ipc.open_stream(file)
    else:
        opened = pyarrow.ipc.open_file(file)
        batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
    number = _check_column(opened.schema, path, kind, text_key)
    for batch in batches:
        batch.column(number).validate(full=True)
        yield batch.column(number)


def _check_column(schema: Any, path: Path, kind: str, text_key: str) -> int:
    """The number of the column. Raises: DataError if there is none, or it is not text."""
    import pyarrow.types

    text = [field.name for field in schema if _is_text(pyarrow.types, field.type)]
    if schema.names.count(text_key) != 1 or text_key not in text:
        rule = f"has no column of text {text_key!r}; data.text_key names one of {shown(text)}" if text else (
            f"has no column of text; its columns are {shown(list(schema.names))}")
        raise DataError(f"{path}: is {kind} and {rule}")
    return int(schema.names.index(text_key))


def _is_text(types: Any, kind: Any) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder that `datasets` has saved, of its part `train` if it has parts; empty: it is none.

    Raises: DataError if it is damaged, or has parts and none is called train.
    """
    splits = folder / _SPLITS
    if splits.is_file():
        names = _names(splits, _plain(splits).get("splits"))
        if _TRAIN not in names:
            rule = f"is a Hugging Face dataset of the parts {shown(names)}; name one of these folders in it"
            raise DataError(f"{folder}: {rule}")
        folder = folder / _TRAIN
    state = folder / _STATE
    if not state.is_file():
        return []
    files = _plain(state).get("_data_files")
    if files is None and not splits.is_file():
        return []  # another program's
    names = _names(state, [f.get("filename") if isinstance(f, dict) else None for f in files]
                   if isinstance(files, list) else None)
    return [folder / name for name in names]


def _plain(path: Path) -> dict[str, Any]:
    damage = "is not of a Hugging Face dataset"
    with errors_as(DataError, path, damage, failure=damage):
        found = read_json(path, _MAX_STATE)
    return found if isinstance(found, dict) else {}


def _names(path: Path, found: Any) -> list[str]:
    """Plain names of files. Raises: DataError if they are none."""
    if not isinstance(found, list) or not all(
            isinstance(n, str) and n not in ("", ".", "..") and n.isprintable() and Path(n).name == n for n in found):
        raise DataError(f"{path}: is of a damaged Hugging Face dataset: it lists {shown(found)}, not names of files")
    return found
