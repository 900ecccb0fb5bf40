"""Trains a tagger on the bundled sample, measures it and tags three texts."""

from __future__ import annotations

import tempfile
import time

from transformers import pipeline

from hf_xmc import XMCTrainer, XMCTrainingArguments, load_sample
from hf_xmc.evaluation import format_metrics

TEXTS = [
    "Prospects for renewable energy education in Jordan",
    "Water quality and eutrophication of lakes in southern Finland",
    "Mental health of young people during the transition from school to work",
]
METRICS = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@5", "R@10")


def main() -> None:
    """Runs the example."""
    start = time.perf_counter()
    data = load_sample()
    with tempfile.TemporaryDirectory() as folder:
        trainer = XMCTrainer(
            args=XMCTrainingArguments(folder, method="xr-linear"),
            train_dataset=data["train"],
            eval_dataset=data["test"],
        )
        trainer.train()
        results = trainer.evaluate()
        tag = pipeline("extreme-text-classification", model=folder)
        tags = tag(TEXTS, top_k=3)

    documents, labels = len(data["train"]), trainer.model.label_tree.num_labels
    print(
        f"\nTrained on {documents:,} documents with {labels:,} labels. On {len(data['test']):,} others, in percent:\n"
    )
    print(format_metrics({name: results[f"eval_{name}"] for name in METRICS}))
    for text, found in zip(TEXTS, tags):
        print(f"\n{text}")
        for entry in found:
            print(f"  {entry['score']:.2f}  {entry['label']}")
    print(f"\nAll in {time.perf_counter() - start:.0f} seconds.")


if __name__ == "__main__":
    main()
