"""Training in several processes: they share the work and end in the model of a single process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from encoder_runs import assert_same_model, tensors_of
from training_worker import launch, launch_without_launcher, results, run_job

from hf_xmc.parallel.stage_cache import CACHE_FOLDER

pytestmark = pytest.mark.usefixtures("fast_garbage_collection", "few_sparse_rows")

# Each process draws its own dropout.
STEPS = {"level_dropout": 0.0, "encoder_dropout": 0.0, "save_strategy": "no"}
TRAININGS = {
    "xr-linear": {"method": "xr-linear"},
    "knn": {"method": "knn"},
    "frozen": {"method": "xr-transformer", "level_steps": [0]},
    "xr-transformer": {"method": "xr-transformer", "level_negatives": ["both"], **STEPS},
    "label-texts": {"method": "xr-transformer", "level_objective": "label_texts", "logging_steps": 1, **STEPS},
    "x-transformer": {"method": "x-transformer", "gradient_checkpointing": True, **STEPS},
    "lightxml": {"method": "lightxml", "gradient_accumulation_steps": 2, **STEPS},
    "aplc-xlnet": {"method": "aplc-xlnet", **STEPS},
}
# The others are slow tests.
QUICK = ("xr-linear", "frozen", "xr-transformer", "label-texts", "lightxml")
# Models of these trainings that get further documents.
EXTENDED = ("xr-linear", "frozen")
# Under FSDP, and the step of a checkpoint to resume from: that of lightxml is in the part with averaged weights.
SHARDED = {"xr-transformer": 8, "label-texts": 3, "lightxml": 3}


@pytest.fixture
def few_sparse_rows(monkeypatch):
    """Jobs that run in this process change it."""
    monkeypatch.setattr("hf_xmc.modeling_heads.SPARSE_ROWS", 20)


def make_job(name, folder, encoder, processes):
    """A training whose steps have the same number of documents whatever the number of processes."""
    job = {"folder": str(folder), "encoder": None, "options": dict(TRAININGS[name])}
    if name not in ("xr-linear", "knn"):
        job |= {"encoder": str(encoder), "sparse_rows": 20}
        parts = processes * job["options"].get("gradient_accumulation_steps", 1)
        job["options"]["per_device_train_batch_size"] = 32 // parts
    return job


def make_sharded_jobs(name, folder, encoder):
    """A training under FSDP, and one that is resumed from its checkpoint."""
    step, job = SHARDED[name], make_job(name, folder / f"{name}-sharded", encoder, 2)
    job["options"] |= {"save_strategy": "steps", "save_steps": step, "fsdp": True}
    job["fsdp"] = True
    return [job, {**job, "folder": str(folder / f"{name}-resumed"), "resume": f"{job['folder']}/checkpoint-{step}"}]


def make_extension(name, base, folder, encoder):
    """Further documents for the model of a training."""
    return {**make_job(name, folder, encoder, 1), "extends": str(base / name)}


@pytest.fixture
def together(tiny_encoder, make_once):
    """Returns the folder of what two processes trained together: the quick trainings, or the others and FSDP."""

    def get(quick):
        def fill(folder):
            names = [name for name in TRAININGS if (name in QUICK) == quick]
            jobs = [make_job(name, folder / name, tiny_encoder, 2) for name in names]
            if quick:
                jobs += [make_extension(name, folder, folder / f"{name}-extended", tiny_encoder) for name in EXTENDED]
            else:
                jobs += [job for name in SHARDED for job in make_sharded_jobs(name, folder, tiny_encoder)]
            done = launch(jobs, folder, processes=2)
            assert done.returncode == 0, done.stderr[-5000:]

        return make_once("together" if quick else "together-slow", fill)

    return get


def assert_close_models(first, second):
    """Checks that the weights in two folders are equal but for rounding."""
    weights, others = tensors_of(first), tensors_of(second)
    assert weights.keys() == others.keys()
    for key, tensor in weights.items():
        torch.testing.assert_close(
            others[key], tensor, rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TRAININGS]
)
def test_two_processes_train_the_model_of_one(together, tiny_encoder, tmp_path, name):
    folder = together(name in QUICK) / name
    run_job(**make_job(name, tmp_path / name, tiny_encoder, 1))
    (alone,) = results(tmp_path / name, 1)
    first, second = results(folder, 2)
    assert first == second and first["processes"] == 2 and alone["processes"] == 1
    assert first["metrics"] == pytest.approx(alone["metrics"], abs=0.02)
    # Of label texts, whose negatives are those of all processes.
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-3)
    assert_close_models(tmp_path / name, folder)
    if name in ("xr-linear", "knn", "frozen"):
        # With the same vectors nothing depends on the number of processes.
        assert_same_model(tmp_path / name, folder)
        assert first["predictions"] == alone["predictions"] and first["metrics"] == alone["metrics"]
    assert not (folder / CACHE_FOLDER).exists()


@pytest.mark.parametrize("name", EXTENDED)
def test_two_processes_extend_a_model_as_one(together, tiny_encoder, tmp_path, name):
    run_job(**make_extension(name, together(True), tmp_path, tiny_encoder))
    (alone,) = results(tmp_path, 1)
    first, second = results(together(True) / f"{name}-extended", 2)
    assert first == second and first["predictions"] == alone["predictions"]
    assert_same_model(tmp_path, together(True) / f"{name}-extended")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_fsdp_trains_the_same_model_and_is_resumed(together, tiny_encoder, tmp_path, name):
    plain, folder = together(True) / name, together(False)
    whole = results(plain, 2)[0]
    first, second = results(folder / f"{name}-sharded", 2)
    assert first["has_fsdp"] and not whole["has_fsdp"]
    assert max(first.pop("moments"), second.pop("moments")) < 0.6 * whole["moments"]
    assert first == second
    assert_close_models(plain, folder / f"{name}-sharded")
    assert_same_model(folder / f"{name}-sharded", folder / f"{name}-resumed")
    # Checkpoints hold whole models: one process can resume them.
    checkpoint = folder / f"{name}-sharded" / f"checkpoint-{SHARDED[name]}"
    run_job(**make_job(name, tmp_path, tiny_encoder, 1), resume=str(checkpoint))
    assert_close_models(plain, tmp_path)


@pytest.mark.slow
def test_a_dead_process_ends_the_others_and_the_training_can_be_resumed(tiny_encoder, tmp_path):
    options = {"method": "xr-transformer", "level_steps": [6], "save_steps": 2, "per_device_train_batch_size": 16}
    job = {"folder": str(tmp_path / "model"), "encoder": str(tiny_encoder), "options": options}
    main, other = launch_without_launcher([{**job, "die": (1, 3)}], tmp_path, 2)
    said = main.communicate(timeout=120)[1]
    assert other.wait(timeout=10) == -9 and main.returncode == 1
    assert "ConnectionError" in said and "0 of 2" in said
    assert [path.name for path in (tmp_path / "model").glob("checkpoint-*")] == ["checkpoint-2"]
    # One process resumes the training of two, with as many documents in a step.
    options["per_device_train_batch_size"] = 32
    run_job(**{**job, "resume": True})
    assert results(tmp_path / "model", 1)[0]["processes"] == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes, to save the time of imports")
def test_kills_at_random_moments_change_nothing():
    """Training, upload and prediction, see `kills.py`."""
    command = [sys.executable, str(Path(__file__).with_name("kills.py")), "--kills", "7", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    assert done.stdout.rstrip().endswith("nothing differed.")
