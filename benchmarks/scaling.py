"""
What more processes would bring, computed from the stage times of a training that was measured.

`python -m benchmarks.scaling MODEL` reads the `training_record.json` of a model that was trained in one process and
prints a table. It is arithmetic with assumptions, which are its options, and no measurement.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_xmc.training.record import TrainingRecord

# Stages that run the encoder; the others that are shared out compute on CPUs. What is named in neither is done once.
ENCODER_STAGES = ("embed", "fine-tuning", "heads' share")
SHARED_STAGES = ("shortlist", "bootstrap", "match", "ranker")


def split_stages(stages: dict[str, float]) -> dict[str, float]:
    """Seconds of fine-tuning, of encoding, of what CPUs share and of what one process does alone."""
    parts = {"fine-tuning": 0.0, "encoding": 0.0, "shared": 0.0, "alone": 0.0}
    for name, seconds in stages.items():
        if name.endswith("fine-tuning"):
            parts["fine-tuning"] += seconds
        elif name.endswith(ENCODER_STAGES):
            parts["encoding"] += seconds
        else:
            parts["shared" if name.endswith(SHARED_STAGES) else "alone"] += seconds
    return parts


def predict_seconds(parts: dict[str, float], steps: int, processes: int, nodes: int, args: Any) -> dict[str, float]:
    """Seconds of each part with so many processes, a GPU each, and as many documents in a step as before."""
    batch = args.batch_size / processes
    # A GPU that gets few documents at a time does not work any faster on them: half its speed at `half_batch`.
    speed = args.gpu_speed * batch / (batch + args.half_batch)
    share = 2 * (processes - 1) / processes * args.gradient_bytes
    sending = share / (args.network if nodes > 1 else args.bus) + args.latency * max(processes - 1, 0).bit_length()
    return {
        "fine-tuning": parts["fine-tuning"] / speed / processes,
        "sending gradients": steps * sending if processes > 1 else 0.0,
        "encoding": parts["encoding"] / args.gpu_speed / processes,
        "shared": parts["shared"] / (args.cores_per_process * processes),
        "alone": parts["alone"] / args.cores_per_process,
    }


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a model that one process trained on `--cores` cores")
    parser.add_argument("--steps", type=int, required=True, help="steps of fine-tuning")
    parser.add_argument("--batch-size", type=int, default=32, help="documents of a step, all processes together")
    parser.add_argument("--gpu-speed", type=float, default=60.0, help="speed of a GPU with full batches; measured: 1")
    parser.add_argument("--half-batch", type=float, default=8.0, help="documents at which a GPU has half of that")
    parser.add_argument("--cores-per-process", type=float, default=8.0, help="cores of a process; measured: 1")
    parser.add_argument("--gradient-bytes", type=float, default=98e6, help="gradients of a step")
    parser.add_argument("--bus", type=float, default=100e9, help="bytes per second between GPUs of a machine")
    parser.add_argument("--network", type=float, default=10e9, help="bytes per second between machines")
    parser.add_argument("--latency", type=float, default=3e-5, help="seconds of a message")
    return parser


def main() -> None:
    """Prints the table."""
    args = make_parser().parse_args()
    record = TrainingRecord.load(args.model)
    if not record.stages:
        raise SystemExit(f"`{args.model}` has no `training_record.json` with the times of its stages.")
    parts = split_stages(record.stages)
    measured = sum(parts.values())
    print(f"measured: {measured:,.0f} s in one process: " + ", ".join(f"{n} {s:,.0f}" for n, s in parts.items()))
    print("\n| GPUs | machines | " + " | ".join(predict_seconds(parts, 1, 1, 1, args)) + " | all, s | speed |")
    print("|---:|---:|" + "---:|" * 7)
    alone = sum(predict_seconds(parts, args.steps, 1, 1, args).values())
    for processes, nodes in ((1, 1), (2, 1), (4, 1), (8, 1), (16, 2), (32, 4), (64, 8), (512, 64)):
        seconds = predict_seconds(parts, args.steps, processes, nodes, args)
        cells = " | ".join(f"{value:.1f}" for value in seconds.values())
        whole = sum(seconds.values())
        print(f"| {processes} | {nodes} | {cells} | {whole:.1f} | {alone / whole:.1f} |")


if __name__ == "__main__":
    main()
