"""The module for the `evaluate` library, in its own process: the library fixes its cache folders when imported."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from scipy import sparse

from hf_xmc.evaluation import XMCMetrics, load_metric

PREDICTIONS = [[2, 0, 1, 3], [1, 0, -1, -1], [3, 1]]
REFERENCES = [[2, 3], [], [1, 5, 1]]
COUNTS = [30, 9, 4, 1]

SCRIPT = """
import json
import evaluate
import numpy as np
from hf_xmc.evaluation import METRIC_PATH, load_metric

predictions, references, counts = json.loads({arguments!r})
settings = dict(counts=counts, num_documents=40, ks=[1, 3])
results = {{}}
metric = load_metric()
results["at once"] = metric.compute(predictions=predictions, references=references, **settings)
for prediction, reference in zip(predictions, references):
    metric.add(prediction=prediction, reference=reference)
results["one by one"] = metric.compute(**settings)
metric = evaluate.load(METRIC_PATH, keep_in_memory=True)
metric.add_batch(predictions=predictions[:2], references=references[:2])
metric.add_batch(predictions=predictions[2:], references=references[2:])
results["batches"] = metric.compute(**settings)
array = np.array([[2, 0], [1, 0]])
results["array"] = metric.compute(predictions=array, references=[[2], [3]], ks=[1, 2])
results["parents"] = metric.compute(predictions=[[1]], references=[[2]], ks=[1], parents=[[], [0], [1]])
for name, bad in {{
    "short": dict(predictions=[[0, 1]], references=[[0]]),
    "negative": dict(predictions=[[0]], references=[[-1]], ks=[1]),
    "twice": dict(predictions=[[0, 0]], references=[[1]], ks=[2]),
}}.items():
    try:
        load_metric(keep_in_memory=True).compute(**bad)
    except ValueError as error:
        results[name] = str(error)
print("RESULTS" + json.dumps(results))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("hf_home")


@pytest.fixture(scope="module")
def results(cache):
    pytest.importorskip("evaluate")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    script = SCRIPT.format(arguments=json.dumps([PREDICTIONS, REFERENCES, COUNTS]))
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("RESULTS")[2])


def test_equals_xmc_metrics(results):
    metrics = XMCMetrics(counts=COUNTS, num_documents=40, ks=[1, 3])
    truth = sparse.csr_matrix([[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 1]])
    metrics.update(np.array([[2, 0, 1, 3], [1, 0, -1, -1], [3, 1, -1, -1]]), truth)
    assert results["at once"] == results["one by one"] == results["batches"] == metrics.compute()
    assert "PSP@3" in results["at once"]


def test_without_counts(results):
    assert (results["array"]["P@1"], results["array"]["P@2"]) == (0.5, 0.25)
    assert "PSP@1" not in results["array"]


def test_parents(results):
    assert (results["parents"]["P@1"], results["parents"]["hP@1"], results["parents"]["hR@1"]) == (0, 1, 2 / 3)


def test_errors(results):
    assert "`indices`" in results["short"]
    assert "`references`" in results["negative"]
    assert "label id 0 more than once" in results["twice"]


def test_writes_under_hf_home_only(results, cache):
    assert any(cache.rglob("xmc_metrics.py"))
    assert not any(cache.rglob("*.arrow"))  # cleaned up after compute


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "evaluate", None)
    with pytest.raises(ImportError, match="evaluate"):
        load_metric()
