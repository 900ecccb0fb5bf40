"""Three hundred random damages, see `fuzz_models.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_random_damages(tmp_path):
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.fuzz_models", "--number", "300", "--seed", "0", "--output", str(output)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    assert output.exists(), done.stderr[-3000:]
    total = json.loads(output.read_text())["total"]
    assert set(total) <= {"loaded", "refused", "unnamed", "changed"}, done.stdout[-3000:]
    assert total["refused"] > total["loaded"] > 0
    assert total.get("unnamed", 0) < 10
