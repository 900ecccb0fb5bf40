"""The sample set inside the package: titles of library records and their subjects."""

from __future__ import annotations

from pathlib import Path

from datasets import DatasetDict

from .readers import load_xmc_dataset

SAMPLE_FOLDER = Path(__file__).with_name("sample")


def load_sample(cache_dir: str | None = None) -> DatasetDict:
    """
    The bundled sample: `train`, `validation` and `test` with the columns `text` and `labels` (names of subjects).

    Its origin, licences and numbers are in the `README.md` beside the files.

    Args:
        cache_dir (`str`, *optional*):
            Where the Arrow files go; by default the cache of `datasets`.
    """
    splits = load_xmc_dataset(SAMPLE_FOLDER, cache_dir=cache_dir)
    assert isinstance(splits, DatasetDict)
    return splits
