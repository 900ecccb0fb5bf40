"""Tests of hf_xmc.training.checkpoint: files of a checkpoint, without pickle."""

import logging
import random

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from hf_xmc.training.checkpoint import (
    LEVEL_FILE,
    SEAL_FILE,
    TRAINER_STATE_FILE,
    find_damage,
    last_checkpoint,
    load_level_state,
    load_optimizer,
    load_random_state,
    save_level_state,
    save_optimizer,
    save_random_state,
    seal_checkpoint,
)
from hf_xmc.training.optimizer import RowAdamW


def assert_no_pickle(folder):
    names = [path.name for path in folder.rglob("*") if path.is_file()]
    assert names and all(name.endswith((".json", ".safetensors")) for name in names)


# ---- Optimiser ----


class Training:
    """A parameter with sparse gradients, one with dense ones, one that is never touched, and a scheduler."""

    def __init__(self):
        self.parameters = [torch.nn.Parameter(torch.ones(4, 2)) for _ in range(3)]
        groups = [{"params": self.parameters[:1], "weight_decay": 0.1}, {"params": self.parameters[1:]}]
        self.optimizer = RowAdamW(groups, lr=1.0, weight_decay=0.0)
        rates = [lambda step: 0.1 / (step + 1), lambda step: 0.01 * (step + 1)]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rates)

    def step(self, number):
        gradient = torch.randn(4, 2, generator=torch.Generator().manual_seed(number))
        rows = [number % 4, (number + 1) % 4]
        self.parameters[0].grad = torch.sparse_coo_tensor([rows], gradient[rows], (4, 2), check_invariants=True)
        self.parameters[1].grad = gradient
        self.optimizer.step()
        self.scheduler.step()


def test_optimizer_and_scheduler_go_on_to_the_last_bit(tmp_path):
    first, second = Training(), Training()
    for number in range(5):
        first.step(number)
    save_optimizer(str(tmp_path), first.optimizer.state_dict(), first.scheduler.state_dict())
    assert_no_pickle(tmp_path)
    optimizer, scheduler = load_optimizer(str(tmp_path))
    with torch.no_grad():
        for mine, other in zip(second.parameters, first.parameters, strict=True):
            mine.copy_(other)
    second.optimizer.load_state_dict(optimizer)
    second.scheduler.load_state_dict(scheduler)
    assert second.scheduler.get_last_lr() == first.scheduler.get_last_lr()
    for number in range(5, 9):
        first.step(number)
        second.step(number)
    for mine, other in zip(second.parameters, first.parameters, strict=True):
        assert torch.equal(mine, other)


# ---- Random numbers ----


def draw():
    gauss = [random.gauss(0, 1), random.random()]
    numbers = np.random.standard_normal(3).tolist() + np.random.rand(2).tolist()  # noqa: NPY002
    return gauss, numbers, torch.rand(3).tolist()


@pytest.fixture
def keep_random_state():
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    yield
    random.setstate(python), np.random.set_state(numpy), torch.set_rng_state(torch_state)  # noqa: NPY002


def test_random_numbers_go_on_as_before(tmp_path, keep_random_state):
    draw()  # an odd number of normal numbers: numpy and Python keep one for the next call
    for process in (0, 1):
        save_random_state(str(tmp_path), process)
        expected = draw()
        draw()
        load_random_state(str(tmp_path), process)
        assert draw() == expected
    assert_no_pickle(tmp_path)


# ---- State of the levels ----


def test_level_state(tmp_path):
    shortlist = csr_matrix(np.array([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=np.float32))
    state = {"active": 1, "schedule": {"steps": [3, 4], "ends": [2, 6]}, "run": {"seed": 3, "level_steps": None}}
    save_level_state(str(tmp_path), state, [None, shortlist])
    assert_no_pickle(tmp_path)
    loaded, (nothing, found) = load_level_state(str(tmp_path))
    assert nothing is None
    assert {name: loaded[name] for name in state} == state
    assert found.shape == shortlist.shape and (found != shortlist).nnz == 0 and found.dtype == np.float32
    # A later checkpoint in the same folder may be of a level without a shortlist.
    for shortlists in ([None], []):
        save_level_state(str(tmp_path), state, shortlists)
        assert load_level_state(str(tmp_path))[1] == shortlists


# ---- Which checkpoint ----


def make_checkpoint(folder, step):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    for file in (TRAINER_STATE_FILE, LEVEL_FILE, "model.safetensors"):
        (path / file).write_text('{"a": 1}')
    seal_checkpoint(path)
    return path


DAMAGES = {
    "missing": lambda path: (path / "model.safetensors").unlink(),
    "too short": lambda path: (path / "model.safetensors").write_text("{"),
    "changed": lambda path: (path / "model.safetensors").write_text('{"a": 2}'),
    "not sealed": lambda path: (path / SEAL_FILE).unlink(),
    "damaged seal": lambda path: (path / SEAL_FILE).write_text("{"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_skipped(tmp_path, caplog, kind):
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / ".checkpoint-3.partial").mkdir()
    assert last_checkpoint(tmp_path) is None and last_checkpoint(tmp_path / "nowhere") is None
    whole = [make_checkpoint(tmp_path, step) for step in (9, 10, 100)]
    assert last_checkpoint(tmp_path) == str(whole[-1]) and find_damage(whole[-1]) is None
    DAMAGES[kind](whole[-1])
    file = SEAL_FILE if "seal" in kind else "model.safetensors"
    assert file in find_damage(whole[-1])
    with caplog.at_level(logging.WARNING, "hf_xmc"):
        assert last_checkpoint(tmp_path) == str(whole[1])
    assert "checkpoint-100" in caplog.text and file in caplog.text
