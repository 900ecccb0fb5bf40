"""Tests of hf_xmc.training.averaging: the mean of a model's states."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_xmc.training.averaging import AVERAGE_FILE, WeightAverage


def make_model():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    return model


def walk(model, average, states):
    for step, state in enumerate(states, start=1):
        with torch.no_grad():
            model.weight.copy_(state)
        average.add(model, step)


STATES = [torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]


def test_mean_of_the_states():
    model, average = make_model(), WeightAverage()
    assert not average.take(model)
    walk(model, average, STATES)
    average.add(model, 5)  # the end of an epoch comes by at the step that was counted
    assert average.count == 5 and set(average.mean) == {"weight"}
    expected = torch.stack(STATES).mean(dim=0)
    with average.in_place(model):
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight, STATES[-1])
    with pytest.raises(RuntimeError), average.in_place(model):
        raise RuntimeError
    assert torch.equal(model.weight, STATES[-1])
    assert average.take(model) and average.count == 0
    torch.testing.assert_close(model.weight.detach(), expected)
    assert not average.take(model)


def test_a_mean_that_was_saved_goes_on_as_before(tmp_path):
    whole, model = WeightAverage(), make_model()
    walk(model, whole, STATES)
    first, second = WeightAverage(), WeightAverage()
    walk(model, first, STATES[:3])
    first.save(str(tmp_path))
    second.load(str(tmp_path), torch.device("cpu"))
    assert (second.count, second.last_step) == (3, 3)
    for step, state in enumerate(STATES[3:], start=4):
        with torch.no_grad():
            model.weight.copy_(state)
        second.add(model, step)
    assert torch.equal(second.mean["weight"], whole.mean["weight"])


def test_nothing_to_save_and_nothing_to_load(tmp_path):
    average = WeightAverage()
    walk(make_model(), average, STATES[:2])
    WeightAverage().save(str(tmp_path))
    assert not (tmp_path / AVERAGE_FILE).exists()
    average.load(str(tmp_path), torch.device("cpu"))
    assert average.count == 0 and not average.mean
