"""Small data and a small model for all tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

NUM_LABELS = 60


def make_documents(count: int, seed: int = 0) -> Dataset:
    """Documents that name their labels: the word `topicNN` stands for the label `label NN`."""
    generator = np.random.default_rng(seed)
    texts, labels = [], []
    for _ in range(count):
        chosen = generator.choice(NUM_LABELS, size=generator.integers(1, 4), replace=False)
        filler = generator.choice(40, size=6)
        words = [f"topic{label:02d}" for label in chosen] + [f"word{word}" for word in filler]
        texts.append(" ".join(generator.permutation(words)))
        labels.append([f"label {label:02d}" for label in chosen])
    return Dataset.from_dict({"text": texts, "labels": labels})


def make_vectors(count: int, seed: int = 0) -> Dataset:
    """The same as vectors: feature NN, of a length other than 1, stands for the label NN."""
    generator = np.random.default_rng(seed)
    ids, values, labels = [], [], []
    for _ in range(count):
        chosen = generator.choice(NUM_LABELS, size=generator.integers(1, 4), replace=False)
        ids.append(sorted(chosen.tolist()))
        values.append([3.0] * len(chosen))
        labels.append(chosen.tolist())
    return Dataset.from_dict({"feature_ids": ids, "feature_values": values, "labels": labels})


@pytest.fixture(scope="session")
def documents() -> Dataset:
    """Training documents."""
    return make_documents(600)


@pytest.fixture(scope="session")
def model_folder(documents: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model trained on `documents`. Read only."""
    from hf_xmc import XMCTrainer, XMCTrainingArguments

    folder = tmp_path_factory.mktemp("model")
    args = XMCTrainingArguments(str(folder), disable_tqdm=True, use_cpu=True)
    XMCTrainer(args=args, train_dataset=documents).train()
    return folder


@pytest.fixture(scope="session")
def vector_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model trained on vectors. Read only."""
    from hf_xmc import XMCTrainer, XMCTrainingArguments

    folder = tmp_path_factory.mktemp("vector-model")
    args = XMCTrainingArguments(str(folder), disable_tqdm=True, use_cpu=True)
    XMCTrainer(args=args, train_dataset=make_vectors(600)).train()
    return folder
