import re

import pytest

from hf_xmc.cli.arguments import load_split
from hf_xmc.data import load_sample
from hf_xmc.data.readers import SAMPLE_FOLDER
from hf_xmc.labels import Labels


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return load_sample(cache_dir=str(tmp_path_factory.mktemp("cache")))


def test_sizes(sample):
    assert list(sample) == ["train", "validation", "test"]
    assert {name: len(split) for name, split in sample.items()} == {
        "train": 16_000,
        "validation": 2_000,
        "test": 2_000,
    }
    assert all(split.column_names == ["text", "labels"] for split in sample.values())
    assert sum(path.stat().st_size for path in SAMPLE_FOLDER.iterdir()) <= 3_000_000


def test_its_splits_by_name(sample):
    dev = load_split("sample", "dev")
    assert str(dev.split) == "validation" and dev["text"][:3] == sample["validation"]["text"][:3]
    assert load_split("sample", "train+dev").num_rows == sample["train"].num_rows + sample["validation"].num_rows
    for wrong in ("train+extra", "extra"):
        with pytest.raises(ValueError, match="it has train, validation, test"):
            load_split("sample", wrong)


def test_readme_has_the_numbers_and_licences(sample):
    readme = (SAMPLE_FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"{len(Labels.from_dataset(sample['train'])):,} subjects" in readme
    assert "CC0 1.0" in readme and "CC BY 4.0" in readme
    for name, split in sample.items():
        per_document = sum(map(len, split["labels"])) / len(split)
        assert re.search(rf"\| {name} \| {len(split):,} \| {per_document:.2f} \|", readme)
