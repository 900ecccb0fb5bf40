"""Reads sheets of Excel files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import pyarrow as pa
from datasets import Dataset, Features, Value

from .streams import cached_dataset

_ROWS_PER_TABLE = 1000


def read_excel(path: Path, split: str, sheet: str | None = None, cache_dir: str | None = None) -> Dataset:
    """Reads a sheet of an Excel file, which must be named if several have rows. The first row names the columns."""
    with closing(_open(path)) as workbook:
        sheets = [name for name in workbook.sheetnames if next(_rows(workbook[name]), None) is not None]
        if sheet is not None and sheet not in workbook.sheetnames:
            raise ValueError(f"`{path}` has no sheet `{sheet}`; it has {', '.join(workbook.sheetnames)}.")
        if sheet is None and len(sheets) != 1:
            if not sheets:
                raise ValueError(f"`{path}` is empty.")
            raise ValueError(f"`{path}` has the sheets {', '.join(sheets)}. Choose one with `sheet` (`--sheet`).")
        sheet = sheet or sheets[0]
        header = next(_rows(workbook[sheet]), ())
    names = {number: str(name).strip() for number, name in enumerate(header) if name is not None}
    if len(set(names.values())) < len(names):
        raise ValueError(f"`{path}`, sheet `{sheet}`: two columns have the same name. Rename one.")
    features = Features({name: Value("string") for name in names.values()})
    options = {"path": str(path), "sheet": sheet, "names": names}
    return cached_dataset(_excel_tables, options, features, files=[path], split=split, cache_dir=cache_dir)


def _open(path: str | Path) -> Any:
    try:
        from openpyxl import load_workbook
    except ImportError as error:
        raise ImportError(f"`{path}` needs openpyxl: pip install 'hf-xmc[excel]'.") from error
    try:
        return load_workbook(path, read_only=True, data_only=True)
    except (BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"`{path}` cannot be read as an Excel file ({error}). Save it again as .xlsx.") from error


def _rows(sheet: Any) -> Iterator[tuple[Any, ...]]:
    """The rows that have a value."""
    rows = sheet.iter_rows(values_only=True) if hasattr(sheet, "iter_rows") else ()
    return (row for row in rows if any(value is not None for value in row))


def _excel_tables(path: str, sheet: str, names: dict[int, str]) -> Iterator[pa.Table]:
    with closing(_open(path)) as workbook:
        rows = _rows(workbook[sheet])
        next(rows)
        while batch := list(islice(rows, _ROWS_PER_TABLE)):
            columns = {name: [_text(row, number) for row in batch] for number, name in names.items()}
            yield pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})


def _text(row: tuple[Any, ...], number: int) -> str | None:
    """The value of a cell as it is displayed: Excel stores 7 as 7.0."""
    value = row[number] if number < len(row) else None
    if value is None:
        return None
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
