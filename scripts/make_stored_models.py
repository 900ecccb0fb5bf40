"""Makes the stored models of version 0.1.0: `python scripts/make_stored_models.py models-0.1.0.zip`.

Run it with the code of revision fd9afb6 (version 0.1.0) on `PYTHONPATH`. One model of each kind is trained
and saved with a file `expected.json`: documents (`texts`, or `vectors` with `feature_ids`, `feature_values` and
`num_features`) and, for each value of `predict_with`, the predicted pairs of label and score. Later versions must load
the models and predict the same (`tests/test_stored_models.py`). `--check FOLDER` compares the models in a folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Some virtual machines announce AMX and end a program that uses it. oneDNN reads this when torch first needs it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import numpy as np
from datasets import Dataset
from scipy.sparse import csr_matrix

from hf_xmc import XMCEnsemble, XMCForTextClassification, XMCTrainer, XMCTrainingArguments
from hf_xmc.version import __version__

EXPECTED_FILE = "expected.json"
NUM_LABELS = 36
NUM_FILLERS = 16
NUM_DOCUMENTS = 144
TOP_K = 5
# Largest difference of two scores that count as the same.
TOLERANCE = 1e-5

# Topics of labels, some with letters beyond ASCII; each has a number besides, so that all are different.
_STEMS = ("énergie", "wasser", "größe", "λόγος", "история", "mining", "o'neill", "野菜", "tree")
_EPOCH = (1980, 1, 1, 0, 0, 0)

# Options of a tree with two levels above the labels.
_THREE_LEVELS: dict[str, Any] = {
    "tree_clustering": "kmeans",
    "tree_branching": 4,
    "tree_max_leaf_size": 3,
    "tree_max_depth": 3,
}
LINEAR_MODELS: dict[str, dict[str, Any]] = {
    "linear": {
        "method": "xr-linear",
        "tfidf_lead_words": 3,
        "tfidf_lead_weight": 0.5,
        "label_features": "both",
        "label_text_length": 0.5,
        **_THREE_LEVELS,
    },
    "vectors": {
        "method": "xr-linear",
        "vector_power": 0.5,
        "ranker_loss": "logistic",
        "ranker_weight_dtype": "float32",
        **_THREE_LEVELS,
    },
    "parabel": {
        "method": "parabel",
        "tree_max_leaf_size": 5,
        "ranker_beam_size": 3,
        "tfidf_analyzer": "char_wb",
        "tfidf_ngram_range": [2, 3],
        "tfidf_max_features": 400,
        "tfidf_power": 1.5,
    },
    "neighbours": {
        "method": "neighbours",
        "neighbours_count": 8,
        "neighbours_power": 2.0,
        "neighbours_terms": 12,
        "tfidf_sublinear_tf": False,
    },
}
ENCODER_MODELS: dict[str, dict[str, Any]] = {
    "xr-transformer": {
        "method": "xr-transformer",
        "level_indices": [1, 2, 3],
        "level_negatives": ["both"],
        "encoder_long_text": "windows",
        "predict_with": "both",
        "heads_share": 0.4,
        **_THREE_LEVELS,
    },
    "refined-tree": {
        "method": "xr-transformer",
        "level_indices": [1, 2, 3],
        "level_loss": "squared_hinge",
        "encoder_pooling": "cls",
        "encoder_long_text": "head_tail",
        "refine_tree": True,
        "embedding_scale": 2.0,
        "predict_with": "both",
        "heads_share": 0.3,
        **_THREE_LEVELS,
    },
    "x-transformer": {
        "method": "x-transformer",
        "tree_max_leaf_size": 5,
        "ranker_train_beam_size": 3,
        "ranker_beam_size": 3,
    },
    "lightxml": {
        "method": "lightxml",
        "level_indices": [1, 2],
        "level_bottleneck": 8,
        "level_beam_size": [3],
        "encoder_pooling_layers": 2,
        "tree_max_leaf_size": 5,
    },
    "aplc-xlnet": {"method": "aplc-xlnet", "tree_shares": [0.4, 0.3, 0.3], "predict_with": "both", "heads_share": 0.5},
}
_MEMBERS = ("linear", "neighbours", "xr-transformer")
_PREDICT_WITH = ("ranker", "heads", "both")


def topic(label: int) -> str:
    """The word that stands for a label in texts."""
    return f"{_STEMS[label % len(_STEMS)]}{label:02d}".replace("'", "")


def label_name(label: int) -> str:
    """Name of a label: not the word, and with characters that a file must keep."""
    return f"{_STEMS[label % len(_STEMS)]}, no. {label}"


def make_documents(count: int, seed: int) -> Dataset:
    """Texts that name their labels, the frequent ones first and most often."""
    generator = np.random.default_rng(seed)
    share = 1 / (np.arange(NUM_LABELS) + 6)
    texts, labels = [], []
    for document in range(count):
        size = int(generator.integers(1, 4))
        chosen = generator.choice(NUM_LABELS, size=size, replace=False, p=share / share.sum())
        chosen[0] = document % NUM_LABELS if document % NUM_LABELS not in chosen else chosen[0]
        fillers = generator.choice(NUM_FILLERS, size=5)
        words = [topic(label) for label in chosen] + [f"word{word}" for word in fillers]
        texts.append(" ".join(generator.permutation(words)))
        labels.append([label_name(label) for label in chosen])
    return Dataset.from_dict({"text": texts, "labels": labels})


def make_vectors(count: int, seed: int) -> Dataset:
    """Vectors of counts: the feature of the number of a label stands for it; further ones mean nothing."""
    generator = np.random.default_rng(seed)
    ids, values, labels = [], [], []
    for document in range(count):
        chosen = set(generator.choice(NUM_LABELS, size=2, replace=False).tolist()) | {document % NUM_LABELS}
        noise = NUM_LABELS + generator.choice(NUM_FILLERS, size=3, replace=False)
        own = sorted([*chosen, *noise.tolist()])
        ids.append(own)
        values.append([4.0 if feature in chosen else float(generator.integers(1, 3)) for feature in own])
        labels.append(sorted(chosen))
    return Dataset.from_dict({"feature_ids": ids, "feature_values": values, "labels": labels})


def make_texts() -> list[str]:
    """Texts to predict for: known ones, a long one, one in capitals, one of unknown words and an empty one."""
    known = make_documents(4, seed=2)["text"][:]
    long = " ".join(make_documents(12, seed=3)["text"][:])
    return [*known, long, f"{topic(7)}: {topic(0)}!".upper(), "nothing of this was there before", ""]


def save_encoder(folder: Path) -> None:
    """Writes a tiny random BERT with a tokenizer of the words of the texts."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.normalizers import Lowercase
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = [topic(label) for label in range(NUM_LABELS)] + [f"word{word}" for word in range(NUM_FILLERS)]
    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **names).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)


def train(folder: Path, options: dict[str, Any], encoder: Path | None) -> XMCForTextClassification:
    """A trained model, at work in `folder`."""
    settings: dict[str, Any] = {
        "tfidf_min_df": 2,
        "num_threads": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
    }
    if encoder is not None:
        settings |= {
            "encoder_max_length": 12,
            "per_device_train_batch_size": 16,
            "level_steps": [30],
            "level_learning_rate": [1e-3],
            "level_head_learning_rate": [3e-2],
        }
    args = XMCTrainingArguments(str(folder), **{**settings, **options})
    texts = {label_name(label): topic(label) for label in range(NUM_LABELS) if label % 5}
    make = make_vectors if "vector_power" in options else make_documents
    trainer = XMCTrainer(
        model=encoder,
        args=args,
        train_dataset=make(NUM_DOCUMENTS, seed=1),
        label_texts=texts if "label_text_length" in options else None,
    )
    trainer.train()
    if encoder is not None:
        # A folder that is gone by then is of no use in the archive, and two runs would not make the same one.
        trainer.model.config.encoder_config.name_or_path = encoder.name
    return trainer.model.eval()


def documents_of(expected: Mapping[str, Any]) -> list[str] | csr_matrix:
    """The documents of an `expected.json`."""
    if "texts" in expected:
        return expected["texts"]
    vectors = expected["vectors"]
    ends = np.cumsum([0, *map(len, vectors["feature_ids"])])
    ids = np.array([feature for row in vectors["feature_ids"] for feature in row])
    values = np.array([value for row in vectors["feature_values"] for value in row], np.float32)
    return csr_matrix((values, ids, ends), shape=(len(ends) - 1, vectors["num_features"]))


def predict(model: Any, expected: Mapping[str, Any], predict_with: str) -> list[list[list[Any]]]:
    """Pairs of label and score for each document."""
    asked = None if predict_with == "default" else predict_with
    found = model.predict(documents_of(expected), top_k=TOP_K, num_threads=1, predict_with=asked)
    return [[[label, score] for label, score in row] for row in found]


def save(model: Any, folder: Path, **options: Any) -> None:
    """Writes a model and what it predicts."""
    model.save_pretrained(folder, **options)
    expected: dict[str, Any] = {"version": __version__}
    if folder.name == "vectors":
        data = make_vectors(7, seed=2)
        vectors = {name: [*data[name], []] for name in ("feature_ids", "feature_values")}
        expected["vectors"] = {**vectors, "num_features": model.ranker.num_sparse}
    else:
        expected["texts"] = make_texts()
    expected["predictions"] = {"default": predict(model, expected, "default")}
    for predict_with in _PREDICT_WITH if getattr(model.config, "head_levels", None) else ():
        try:
            expected["predictions"][predict_with] = predict(model, expected, predict_with)
        except ValueError:  # it has no ranker, or no head for the labels
            continue
    text = json.dumps(expected, ensure_ascii=False, indent=1)
    (folder / EXPECTED_FILE).write_text(text + "\n", encoding="utf-8")


def make_models(folder: Path) -> None:
    """Trains all models and saves each in a subfolder."""
    with tempfile.TemporaryDirectory() as scratch:
        encoder = Path(scratch, "encoder")
        save_encoder(encoder)
        models = {}
        for kind, options in {**LINEAR_MODELS, **ENCODER_MODELS}.items():
            print(f"training {kind}", flush=True)
            models[kind] = train(Path(scratch, kind), options, encoder if kind in ENCODER_MODELS else None)
            save(models[kind], folder / kind)
        save(models["linear"], folder / "linear-with-code", self_contained=True)
        save(models["xr-transformer"], folder / "shards", max_shard_size="12KB")
        members = [models[kind] for kind in _MEMBERS]
        save(XMCEnsemble.from_members(members, weights=[2, 1, 1]), folder / "ensemble")
        ranks = XMCEnsemble.from_members(members, combine="ranks", candidates=20)
        save(ranks, folder / "ensemble-with-code", self_contained=True)


def check_rows(found: list[list[list[Any]]], expected: list[list[list[Any]]], where: str) -> None:
    """Raises where predictions differ. Labels with almost the same score may change places."""
    for document, (own, other) in enumerate(zip(found, expected, strict=True)):
        scores, wanted = ([score for _, score in row] for row in (own, other))
        np.testing.assert_allclose(scores, wanted, rtol=0, atol=TOLERANCE, err_msg=f"{where}, document {document}")
        known = dict(map(tuple, other))
        for label, score in own:
            if abs(known.get(label, other[-1][1]) - score) > 2 * TOLERANCE:
                raise ValueError(f"{where}, document {document}: {own} is not {other}.")


def check_models(folder: Path) -> None:
    """Raises where a model does not predict what is beside it."""
    from transformers import AutoModel

    for path in sorted(folder.glob(f"*/{EXPECTED_FILE}")):
        expected = json.loads(path.read_text(encoding="utf-8"))
        model = AutoModel.from_pretrained(path.parent)
        for predict_with, rows in expected["predictions"].items():
            check_rows(predict(model, expected, predict_with), rows, f"{path.parent.name}, {predict_with}")
        print(f"{path.parent.name}: {', '.join(expected['predictions'])} as expected", flush=True)
    names = {path.name: {entry.name for entry in path.iterdir()} for path in folder.iterdir()}
    special = [("refined-tree", "ranker_tree.safetensors"), ("aplc-xlnet", "ranker_tree.safetensors")]
    special += [("shards", "ranker.safetensors.index.json"), ("shards", "model.safetensors.index.json")]
    special += [("linear-with-code", "pipeline_xmc.py"), ("ensemble-with-code", "pipeline_xmc.py")]
    missing = [f"{kind}/{name}" for kind, name in special if name not in names[kind]]
    if missing:
        raise ValueError(f"The models are not as they should be, they lack {', '.join(missing)}.")


def pack(folder: Path, archive: Path) -> None:
    """All files of a folder as an archive, always in the same order and of the same date."""
    with zipfile.ZipFile(archive, "w") as target:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), _EPOCH)
            entry.external_attr = 0o644 << 16
            target.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)


def main() -> None:
    """Makes the archive, or checks models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("archive", type=Path, nargs="?", help="the archive to write")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="compare the models in this folder instead")
    arguments = parser.parse_args()
    if (arguments.archive is None) == (arguments.check is None):
        parser.error("pass the archive to write, or `--check FOLDER`")
    if arguments.check is not None:
        check_models(arguments.check)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        # In a process of its own, which has only the files.
        subprocess.run([sys.executable, __file__, "--check", folder], check=True)
        pack(Path(folder), arguments.archive)


if __name__ == "__main__":
    main()
