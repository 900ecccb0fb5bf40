"""Training, upload and prediction that are killed at random moments, see `kills.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes, to save the time of imports")
def test_kills_at_random_moments_change_nothing():
    command = [sys.executable, str(Path(__file__).with_name("kills.py")), "--kills", "7", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    assert done.stdout.rstrip().endswith("nothing differed.")
