"""One model in several threads and in forked processes gives the results of a single one."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import make_documents
from transformers import AutoModel

TEXTS = make_documents(40, seed=5)["text"]
# `datasets` forks the processes of `map`; the parent has used all threads before. It runs as a program, so that a
# process that hangs can be ended.
IN_FORKS = """
import sys
import torch
from datasets import Dataset
from transformers import AutoModel
import hf_xmc

torch.set_num_threads(2)
model = AutoModel.from_pretrained(sys.argv[1])
texts = [f"topic{i % 60:02d} word{i % 40:02d}" for i in range(64)]
alone = model.predict(texts, top_k=3)
names = [[label for label, _ in row] for row in alone]
mapped = Dataset.from_dict({"text": texts}).map(
    lambda batch: {"names": [[label for label, _ in row] for row in model.predict(batch["text"], top_k=3)]},
    batched=True, batch_size=16, num_proc=2,
)
assert mapped["names"][:] == names
"""


@pytest.mark.parametrize("kind", ["model_folder", "encoder_model_folder", "ensemble_folder"])
def test_threads(kind, request):
    model = AutoModel.from_pretrained(request.getfixturevalue(kind)).eval()
    expected = [model.predict([text], top_k=4) for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: model.predict([text], top_k=4), TEXTS)) == expected


@pytest.mark.parametrize("kind", ["model_folder", "encoder_model_folder"])
def test_forks(kind, request, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(IN_FORKS)
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(program), str(request.getfixturevalue(kind))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
