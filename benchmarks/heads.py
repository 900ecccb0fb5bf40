"""
Heads alone: how they start, learning rate, dropout and weight averaging, on the sample's validation documents.

    python -m benchmarks.heads --encoder FOLDER --method lightxml --steps 0
    python -m benchmarks.heads --encoder FOLDER --method lightxml --steps 0 --no_prior --cost 4

Trains encoder and heads without a ranker and prints one line of JSON: the options, and P@1, nDCG@5 and PSP@5 of the
heads. `--embedding_cache FOLDER` shares the vectors of the encoder before fine-tuning between runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from typing import Any

from hf_xmc import XMCTrainer, XMCTrainingArguments, load_sample
from hf_xmc.inference.predict import evaluate_model
from hf_xmc.parallel.stage_cache import Runtime
from hf_xmc.training.presets import METHODS


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--method", default="xr-transformer", choices=("xr-transformer", "lightxml", "aplc-xlnet"))
    parser.add_argument("--steps", type=int, default=60, help="steps of 32 documents, 0 for the initial heads")
    parser.add_argument("--no_prior", action="store_true", help="initial heads are drawn to 0")
    parser.add_argument("--cost", type=float, default=1.0, help="C of the initial heads")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--head_learning_rate", type=float, default=5e-3)
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--swa_start", type=float)
    parser.add_argument("--embedding_cache")
    args = parser.parse_args()
    level = METHODS[args.method].setdefault("level", {})
    level.update(bootstrap_prior=not args.no_prior, bootstrap_cost=args.cost)
    options: dict[str, Any] = {"method": args.method, "predict_with": "heads", "save_strategy": "no", "bf16": True}
    options |= {"encoder_name": args.encoder, "encoder_max_length": 48, "encoder_attn_implementation": "eager"}
    options |= {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 64}
    options |= {"max_steps": args.steps} if args.steps else {"num_train_epochs": 0}
    options |= {"learning_rate": args.learning_rate, "level_head_learning_rate": args.head_learning_rate}
    for name in ("dropout", "swa_start"):
        if getattr(args, name) is not None:
            options[f"level_{name}"] = getattr(args, name)
    data, start = load_sample(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        arguments = XMCTrainingArguments(folder, embedding_cache=args.embedding_cache, **options)
        trainer = XMCTrainer(args=arguments, train_dataset=data["train"])
        trainer.train()
        metrics = evaluate_model(trainer.model, data["validation"], ks=(1, 5), runtime=Runtime()).compute()
    found = {name: round(100 * metrics[name], 2) for name in ("P@1", "nDCG@5", "PSP@5")}
    seconds = round(time.process_time() - start)
    sys.stdout.write(json.dumps({**vars(args), **found, "cpu_seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
