"""Training in several processes: they share the work and end in one model, that of a single process."""

from __future__ import annotations

import pytest
import torch
from encoder_runs import assert_same_model, tensors_of
from training_worker import launch, launch_without_launcher, results, run_job

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fast_garbage_collection")]

# What heads do not see is drawn for the documents of a step, whoever has them; dropout in an encoder would differ.
STEPS = {"level_dropout": 0.3, "encoder_dropout": 0.0, "save_strategy": "no"}
TRAININGS = {
    "xr-linear": {"method": "xr-linear"},
    "knn": {"method": "knn"},
    "frozen": {"method": "xr-transformer", "level_steps": [0]},
    "xr-transformer": {"method": "xr-transformer", "level_negatives": ["both"], **STEPS},
    "x-transformer": {"method": "x-transformer", "gradient_checkpointing": True, **STEPS},
    "lightxml": {"method": "lightxml", "gradient_accumulation_steps": 2, **STEPS},
    "aplc-xlnet": {"method": "aplc-xlnet", **STEPS},
}

# Under FSDP, with checkpoints to go on from: the second while weights are averaged.
SHARDED = {"xr-transformer": 8, "lightxml": 3}


def make_sharded_jobs(folder, encoder, name, step):
    """A training under FSDP, and one that goes on from the checkpoint of the first after so many steps."""
    options = {**TRAININGS[name], "save_strategy": "steps", "save_steps": step, "fsdp": True}
    options |= {"per_device_train_batch_size": 16 // options.get("gradient_accumulation_steps", 1)}
    job = {"encoder": str(encoder), "sparse_rows": 20, "options": options, "fsdp": True}
    whole, resumed = str(folder / f"{name}-sharded"), str(folder / f"{name}-resumed")
    return [{**job, "folder": whole}, {**job, "folder": resumed, "resume": f"{whole}/checkpoint-{step}"}]


def make_jobs(folder, encoder, processes):
    """All trainings, with the same number of documents in a step whatever the number of processes."""
    jobs = []
    for name, options in TRAININGS.items():
        job = {"folder": str(folder / name), "encoder": None, "options": dict(options)}
        if name not in ("xr-linear", "knn"):
            job |= {"encoder": str(encoder), "sparse_rows": 20}
            parts = processes * options.get("gradient_accumulation_steps", 1)
            job["options"]["per_device_train_batch_size"] = 32 // parts
        jobs.append(job)
    return jobs


@pytest.fixture(scope="module")
def together(tiny_encoder, tmp_path_factory):
    """Folder of what two processes trained together."""
    folder = tmp_path_factory.mktemp("together")
    sharded = [job for item in SHARDED.items() for job in make_sharded_jobs(folder, tiny_encoder, *item)]
    done = launch(make_jobs(folder, tiny_encoder, 2) + sharded, folder, processes=2)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


def assert_close_models(first, second):
    """That the weights in two folders are equal but for rounding."""
    weights, others = tensors_of(first), tensors_of(second)
    assert weights.keys() == others.keys()
    for key, tensor in weights.items():
        torch.testing.assert_close(
            others[key], tensor, rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("name", TRAININGS)
def test_two_processes_train_the_model_of_one(together, tiny_encoder, tmp_path, monkeypatch, name):
    monkeypatch.setattr("hf_xmc.modeling_heads.SPARSE_ROWS", 20)
    (job,) = (job for job in make_jobs(tmp_path, tiny_encoder, 1) if job["folder"].endswith(f"/{name}"))
    run_job(**job)
    (alone,) = results(tmp_path / name, 1)
    first, second = results(together / name, 2)
    assert first == second and first["processes"] == 2 and alone["processes"] == 1
    assert first["metrics"] == pytest.approx(alone["metrics"], abs=0.02)
    assert_close_models(tmp_path / name, together / name)
    if name in ("xr-linear", "knn", "frozen"):
        # Given the same vectors nothing depends on the number of processes, to the last bit.
        assert_same_model(tmp_path / name, together / name)
        assert first["predictions"] == alone["predictions"] and first["metrics"] == alone["metrics"]
    assert not (together / name / ".stage_cache").exists()


@pytest.mark.parametrize("name", SHARDED)
def test_fsdp_trains_the_same_model_and_goes_on_from_its_checkpoints(together, tiny_encoder, tmp_path, name):
    whole = results(together / name, 2)[0]
    first, second = results(together / f"{name}-sharded", 2)
    assert first["has_fsdp"] and not whole["has_fsdp"]
    assert max(first.pop("moments"), second.pop("moments")) < 0.6 * whole["moments"]
    assert first == second
    assert_close_models(together / name, together / f"{name}-sharded")
    assert_same_model(together / f"{name}-sharded", together / f"{name}-resumed")
    # Checkpoints are whole, so that one process can go on.
    checkpoint = together / f"{name}-sharded" / f"checkpoint-{SHARDED[name]}"
    job = {"folder": str(tmp_path), "encoder": str(tiny_encoder), "sparse_rows": 20, "resume": str(checkpoint)}
    parts = TRAININGS[name].get("gradient_accumulation_steps", 1)
    run_job(**job, options={**TRAININGS[name], "per_device_train_batch_size": 32 // parts})
    assert_close_models(together / name, tmp_path)


def test_a_process_that_dies_ends_the_others_and_the_training_goes_on(tiny_encoder, tmp_path):
    options = {"method": "xr-transformer", "level_steps": [6], "save_steps": 2, "per_device_train_batch_size": 16}
    job = {"folder": str(tmp_path / "model"), "encoder": str(tiny_encoder), "options": options}
    main, other = launch_without_launcher([{**job, "die": (1, 3)}], tmp_path, 2)
    said = main.communicate(timeout=120)[1]
    assert other.wait(timeout=10) == -9 and main.returncode == 1
    assert "ConnectionError" in said and "Process 0 of 2" in said
    assert [path.name for path in (tmp_path / "model").glob("checkpoint-*")] == ["checkpoint-2"]
    # One process goes on with what two have begun: a step has as many documents as before.
    options["per_device_train_batch_size"] = 32
    run_job(**{**job, "resume": True})
    assert results(tmp_path / "model", 1)[0]["processes"] == 1
