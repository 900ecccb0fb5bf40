"""
Trains as a list of jobs says, in one or several processes: `torchrun --nproc_per_node 2 training_worker.py JOBS.json`.

Starting processes takes longer than the trainings, so that one start serves several of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from conftest import encoder_arguments, make_documents


def launch(
    jobs: list[dict[str, Any]], folder: Path, processes: int, **environment: str
) -> subprocess.CompletedProcess:
    """Runs jobs in so many processes and returns what came of it."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    known = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(
        [*command, __file__, str(path)], env={**known, **environment}, capture_output=True, text=True, timeout=120
    )


def results(folder: str | os.PathLike, processes: int) -> list[dict[str, Any]]:
    """What each process said of a job."""
    return [json.loads(Path(folder, f"process-{index}.json").read_text()) for index in range(processes)]


def run_job(
    folder: str, encoder: str | None, options: dict[str, Any], resume: bool = False, sparse_rows: int | None = None
) -> None:
    """Trains, evaluates and predicts; writes what came of it beside the model."""
    from hf_xmc import XMCTrainer, XMCTrainingArguments, heads
    from hf_xmc.training.work import digest

    if sparse_rows is not None:
        heads.SPARSE_ROWS = sparse_rows
    if encoder is None:
        args = XMCTrainingArguments(folder, use_cpu=True, disable_tqdm=True, report_to="none", **options)
    else:
        args = encoder_arguments(Path(folder), **options)
    held_out = make_documents(50, seed=3)
    trainer = XMCTrainer(model=encoder, args=args, train_dataset=make_documents(160, seed=7), eval_dataset=held_out)
    output = trainer.train(resume_from_checkpoint=resume or None)
    scores, indices = trainer.predict(held_out).predictions
    weights = {name: tensor.detach().numpy() for name, tensor in trainer.model.state_dict().items()}
    content = {
        "processes": args.world_size,
        "weights": digest(*(np.ascontiguousarray(weights[name]) for name in sorted(weights))),
        "predictions": digest(scores, indices),
        "metrics": {name: value for name, value in trainer.evaluate().items() if "@" in name},
        "stages": sorted(name for name in output.metrics if name.endswith("_seconds")),
    }
    Path(folder, f"process-{args.process_index}.json").write_text(json.dumps(content))


if __name__ == "__main__":
    from torch import distributed

    for job in json.loads(Path(sys.argv[1]).read_text()):
        run_job(**job)
    if distributed.is_initialized():
        distributed.destroy_process_group()
