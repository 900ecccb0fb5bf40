"""Models saved by version 0.1.0 (`scripts/make_stored_models.py`) load and give the predictions stored with them."""

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hub_worker import Worker
from scipy.sparse import csr_matrix
from transformers import AutoModel

from hf_xmc.remote_code import code_files

ARCHIVE = Path(__file__).parent / "data" / "models-0.1.0.zip"
EXPECTED = "/expected.json"
with zipfile.ZipFile(ARCHIVE) as archive:
    KINDS = sorted(name.removesuffix(EXPECTED) for name in archive.namelist() if name.endswith(EXPECTED))
WITH_CODE = [kind for kind in KINDS if kind.endswith("-with-code")]
PREDICT = """
import sys
from transformers import AutoModel
model = AutoModel.from_pretrained(name, trust_remote_code=True)
result = model.predict(texts, top_k=5, num_threads=1)
assert not [module for module in sys.modules if module.split(".")[0] == "hf_xmc"]
assert type(model).__module__.startswith("transformers_modules.")
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Folder with a subfolder for each model."""
    folder = tmp_path_factory.mktemp("stored")
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    return folder


def read_expected(folder):
    """The stored documents and predictions."""
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    if "texts" in expected:
        return expected["texts"], expected["predictions"]
    vectors = expected["vectors"]
    ends = np.cumsum([0, *map(len, vectors["feature_ids"])])
    values, ids = (np.concatenate(vectors[name]) for name in ("feature_values", "feature_ids"))
    shape = (len(ends) - 1, vectors["num_features"])
    return csr_matrix((values.astype(np.float32), ids.astype(np.int32), ends), shape=shape), expected["predictions"]


def assert_same_predictions(predictions, expected):
    """Equal scores and labels; labels of equal score may change places."""
    for row, stored_row in zip(predictions, expected, strict=True):
        scores, stored_scores = ([score for _, score in pairs] for pairs in (row, stored_row))
        np.testing.assert_allclose(scores, stored_scores, rtol=0, atol=1e-5)
        by_label = dict(map(tuple, stored_row))
        for label, score in row:
            # A label may be missing only if it ties with the last one.
            assert by_label.get(label, stored_row[-1][1]) == pytest.approx(score, abs=2e-5), label


@pytest.mark.parametrize("kind", KINDS)
def test_predictions(stored, kind, tmp_path):
    documents, predictions = read_expected(stored / kind)
    model = AutoModel.from_pretrained(stored / kind)
    assert type(model).__module__.startswith("hf_xmc.")
    assert predictions
    for predict_with, expected in predictions.items():
        options = {} if predict_with == "default" else {"predict_with": predict_with}
        assert_same_predictions(model.predict(documents, top_k=5, num_threads=1, **options), expected)
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path).predict(documents, top_k=5, num_threads=1)
    assert_same_predictions(again, predictions["default"])


def test_saving_over_a_model_with_code_replaces_the_code(stored, tmp_path):
    folder = Path(shutil.copytree(stored / "linear-with-code", tmp_path / "copy"))
    model = AutoModel.from_pretrained(folder)
    names = {path.name for path in code_files()}
    assert {path.name for path in folder.glob("*.py")} - names  # some modules had other names
    model.save_pretrained(folder)
    assert {path.name for path in folder.glob("*.py")} == names
    model.save_pretrained(folder, self_contained=False)
    assert not list(folder.glob("*.py"))


@pytest.mark.slow  # the loops of the models' code are compiled
def test_predictions_without_the_package(stored, tmp_path):
    worker = Worker({"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}, tmp_path / "log", without_package=True)
    try:
        for kind in WITH_CODE:
            # Under one name, transformers takes the code of both for the same, and it is compiled once.
            folder = tmp_path / kind / "model"
            folder.parent.mkdir()
            folder.symlink_to(stored / kind)
            texts, predictions = read_expected(folder)
            assert_same_predictions(worker.run(PREDICT, name=str(folder), texts=texts), predictions["default"])
    finally:
        worker.close()
