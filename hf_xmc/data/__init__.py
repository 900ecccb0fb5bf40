"""Reading data: any supported file, folder or dataset in one form, a memory-mapped `datasets.Dataset`."""

from __future__ import annotations

from .columns import feature_matrix, prepare_dataset
from .readers import load_sample, load_xmc_dataset
from .vocabularies import load_label_texts, load_vocabulary

__all__ = [
    "feature_matrix",
    "load_label_texts",
    "load_sample",
    "load_vocabulary",
    "load_xmc_dataset",
    "prepare_dataset",
]
