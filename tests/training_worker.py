"""
Runs a list of trainings in one or several processes: `torchrun --nproc_per_node 2 training_worker.py JOBS.json`.

Starting processes takes longer than a training, so one start serves several of them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from conftest import TOPICS, encoder_arguments, make_documents
from transformers import TrainerCallback

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}


def launch(jobs: list[dict[str, Any]], folder: Path, processes: int) -> subprocess.CompletedProcess:
    """Runs jobs in some processes."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return subprocess.run(
        [*command, __file__, str(path)], env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=200
    )


def launch_without_launcher(jobs: list[dict[str, Any]], folder: Path, processes: int) -> list[subprocess.Popen]:
    """Starts the processes without a launcher, which would end all of them if one dies."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, **ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return [
        subprocess.Popen(
            [sys.executable, __file__, str(path)],
            env={**shared, "RANK": str(index), "LOCAL_RANK": str(index)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]


def results(folder: str | os.PathLike, processes: int) -> list[dict[str, Any]]:
    """Results of a job by each process."""
    return [json.loads(Path(folder, f"process-{index}.json").read_text()) for index in range(processes)]


class Die(TrainerCallback):
    """Kills one of the processes after a step."""

    def __init__(self, process: int, step: int) -> None:
        self.process, self.step = process, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and args.process_index == self.process:
            os.kill(os.getpid(), signal.SIGKILL)


def pretend_to_have_gpus(args: Any) -> None:
    """Makes accelerate use FSDP on CPUs, where it works as well."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    assert args.device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def count_moments(optimizer: Any) -> int:
    """Numbers that an optimizer keeps in this process."""
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    return sum((value.to_local() if hasattr(value, "to_local") else value).numel() for value in values)


def run_job(
    folder: str,
    encoder: str | None,
    options: dict[str, Any],
    resume: bool | str = False,
    fsdp: bool = False,
    sparse_rows: int | None = None,
    die: tuple[int, int] | None = None,
    extends: str | None = None,
) -> None:
    """Trains, or extends the model of another job, evaluates and predicts; writes the results beside the model."""
    from hf_xmc import XMCTrainer, XMCTrainingArguments, modeling_heads
    from hf_xmc.parallel.stage_cache import digest

    if sparse_rows is not None:
        modeling_heads.SPARSE_ROWS = sparse_rows
    if encoder is None:
        args = XMCTrainingArguments(folder, use_cpu=True, disable_tqdm=True, report_to="none", **options)
    else:
        args = encoder_arguments(Path(folder), **options)
    if fsdp:
        pretend_to_have_gpus(args)
    held_out = make_documents(50, seed=3)
    callbacks = [] if die is None else [Die(*die)]
    documents = make_documents(160, seed=7)
    texts = TOPICS if options.get("level_objective") == "label_texts" else None
    given: dict[str, Any] = {"model": encoder, "train_dataset": documents}
    if extends is not None:
        given = {"model": extends, "train_dataset": make_documents(5, seed=8), "previous_dataset": documents}
    trainer = XMCTrainer(args=args, eval_dataset=held_out, callbacks=callbacks, label_texts=texts, **given)
    output = trainer.train(resume_from_checkpoint=resume or None)
    scores, indices = trainer.predict(held_out).predictions
    weights = {name: tensor.detach().numpy() for name, tensor in trainer.model.state_dict().items()}
    content = {
        "processes": args.world_size,
        "has_fsdp": trainer.is_fsdp_enabled,
        "weights": digest(*(np.ascontiguousarray(weights[name]) for name in sorted(weights))),
        "predictions": digest(scores, indices),
        "losses": [
            entry[name] for entry in trainer.state.log_history if "loss" in entry for name in ("loss", "grad_norm")
        ],
        "metrics": {name: value for name, value in trainer.evaluate().items() if "@" in name},
        "stages": sorted(name for name in output.metrics if name.endswith("_seconds")),
    }
    if trainer.optimizer is not None:
        content["moments"] = count_moments(trainer.optimizer)
    Path(folder, f"process-{args.process_index}.json").write_text(json.dumps(content))


if __name__ == "__main__":
    from torch import distributed

    for job in json.loads(Path(sys.argv[1]).read_text()):
        run_job(**job)
    if distributed.is_initialized():
        distributed.destroy_process_group()
