"""Tests of hf_xmc.training.optimizer (AdamW for single rows of a parameter) and hf_xmc.training.optimizer."""

import pytest
import torch

from hf_xmc.training.optimizer import AVERAGE_FILE, RowAdamW, WeightAverage

ROWS, COLUMNS = 5, 3
OPTIONS = {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1}


def make_parameter():
    return torch.nn.Parameter(torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)))


def gradients(steps):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(steps)]


def as_sparse(gradient, rows):
    return torch.sparse_coo_tensor([rows], gradient[rows], gradient.shape, check_invariants=True)


def row_steps(optimizer, parameter):
    """How often each row was updated."""
    (steps,) = (value for value in optimizer.state[parameter].values() if value.shape == (len(parameter),))
    return steps.tolist()


@pytest.mark.parametrize("fused", [False, True])
def test_is_adamw_where_every_row_is_touched(fused):
    dense, ours, plain = make_parameter(), make_parameter(), make_parameter()
    reference = torch.optim.AdamW([dense], **OPTIONS)
    optimizer = RowAdamW([{"params": [ours]}, {"params": [plain]}], fused=fused, **OPTIONS)
    for gradient in gradients(6):
        dense.grad, plain.grad = gradient.clone(), gradient.clone()
        ours.grad = as_sparse(gradient, [3, 0, 4, 1, 2])
        reference.step()
        optimizer.step()
        torch.testing.assert_close(ours, dense)
        torch.testing.assert_close(plain, dense)


def test_each_row_moves_as_if_it_were_alone():
    touched = [[0, 2], [2], [1, 2], [0], [2, 1]]
    ours = make_parameter()
    optimizer = RowAdamW([ours], **OPTIONS)
    alone = [torch.nn.Parameter(row.clone()) for row in make_parameter().detach()]
    single = [torch.optim.AdamW([row], **OPTIONS) for row in alone]
    for rows, gradient in zip(touched, gradients(len(touched)), strict=True):
        before = ours.detach().clone()
        ours.grad = as_sparse(gradient, rows)
        optimizer.step()
        for row in range(ROWS):
            if row in rows:
                alone[row].grad = gradient[row].clone()
                single[row].step()
            else:
                assert torch.equal(ours[row], before[row])
            torch.testing.assert_close(ours[row], alone[row])
    assert row_steps(optimizer, ours) == [2, 2, 4, 0, 0]


def test_entries_of_one_row_are_added_up():
    first, second = make_parameter(), make_parameter()
    (gradient,) = gradients(1)
    first.grad = as_sparse(gradient, [1, 4])
    halves = torch.stack([gradient[4] / 2, gradient[1], gradient[4] / 2])
    second.grad = torch.sparse_coo_tensor([[4, 1, 4]], halves, gradient.shape, check_invariants=True)
    for parameter in (first, second):
        RowAdamW([parameter], **OPTIONS).step()
    torch.testing.assert_close(first, second)


def test_groups_have_their_own_options_and_no_gradient_means_no_step():
    fast, slow, idle = make_parameter(), make_parameter(), make_parameter()
    groups = [{"params": [fast], "lr": 0.1}, {"params": [slow, idle], "lr": 0.0}]
    optimizer = RowAdamW(groups, weight_decay=0.0)
    (gradient,) = gradients(1)
    fast.grad, slow.grad = as_sparse(gradient, [0, 1]), as_sparse(gradient, [0, 1])
    optimizer.step()
    start = make_parameter()
    # The first step of Adam is as long as the learning rate, whatever the gradient's size.
    torch.testing.assert_close((fast - start)[:2], -0.1 * gradient[:2].sign(), rtol=1e-4, atol=1e-5)
    assert torch.equal(slow, start) and torch.equal(idle, start) and not optimizer.state[idle]


def test_steps_are_counted_exactly_in_low_precision():
    # 256 + 1 is 256 in bfloat16.
    parameter = torch.nn.Parameter(torch.zeros(2, 1, dtype=torch.bfloat16))
    optimizer = RowAdamW([parameter])
    for step in range(300):
        if step == 250:
            state = optimizer.state_dict()
            optimizer = RowAdamW([parameter])
            optimizer.load_state_dict(state)
        parameter.grad = as_sparse(torch.ones(2, 1, dtype=torch.bfloat16), [0])
        optimizer.step()
    assert row_steps(optimizer, parameter) == [300, 0]


# ---- Weight averaging ----

STATES = [torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]


def walk(average, states, first=1):
    """Adds states of a model, which has a parameter that is not trained, after the steps from `first` on."""
    model = torch.nn.Linear(3, 2)
    model.fixed = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    for step, state in enumerate(states, start=first):
        with torch.no_grad():
            model.weight.copy_(state)
            model.bias.copy_(state[:, 0])
        average.add(model, step)
    return model


def test_mean_of_the_states():
    average = WeightAverage()
    assert not average.apply(torch.nn.Linear(3, 2))
    model = walk(average, STATES)
    average.add(model, 5)  # the end of an epoch adds no step twice
    assert average.count == 5 and set(average.mean) == {"weight", "bias"}
    expected = torch.stack(STATES).mean(dim=0)
    with pytest.raises(RuntimeError), average.in_place(model):
        torch.testing.assert_close(model.weight.detach(), expected)
        raise RuntimeError
    assert torch.equal(model.weight, STATES[-1])
    assert average.apply(model) and average.count == 0
    torch.testing.assert_close(model.weight.detach(), expected)
    assert not average.apply(model)


def test_a_saved_mean_continues_bit_for_bit(tmp_path):
    whole, first, second = WeightAverage(), WeightAverage(), WeightAverage()
    walk(whole, STATES)
    walk(first, STATES[:3])
    first.save(str(tmp_path))
    second.load(str(tmp_path), torch.device("cpu"))
    assert (second.count, second.last_step) == (3, 3)
    walk(second, STATES[3:], first=4)
    assert all(torch.equal(second.mean[name], whole.mean[name]) for name in ("weight", "bias"))


def test_a_checkpoint_without_a_mean(tmp_path):
    average = WeightAverage()
    walk(average, STATES[:2])
    WeightAverage().save(str(tmp_path))
    assert not (tmp_path / AVERAGE_FILE).exists()
    average.load(str(tmp_path), torch.device("cpu"))
    assert average.count == 0 and not average.mean
