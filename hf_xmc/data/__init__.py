"""Reading data: any supported file, folder or dataset in one form, a memory-mapped `datasets.Dataset`."""

from __future__ import annotations

from .columns import feature_matrix, prepare_dataset
from .readers import load_label_texts, load_sample, load_xmc_dataset

__all__ = ["feature_matrix", "load_label_texts", "load_sample", "load_xmc_dataset", "prepare_dataset"]
