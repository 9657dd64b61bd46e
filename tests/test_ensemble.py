"""The mix as a module: values by hand, state, export, bad input."""

import pytest
import torch
from torch import nn

from robboost import Ensemble, InputError
from robboost.models.architectures import build


def linear(rows):
    layer = nn.Linear(2, len(rows), bias=False)
    layer.weight.data = torch.tensor(rows)
    return layer


def pair():
    return linear([[1.0, 0.0], [0.0, 1.0]]), linear([[2.0, 0.0], [0.0, -4.0]])


def test_logits_by_hand():
    ensemble = Ensemble(pair(), [0.25, 0.75], [0.5, 3.0])
    # 0.25/0.5 = 0.5 and 0.75/3 = 0.25: rows (0.5 + 0.5, 0) and (0, 0.5 - 1).
    torch.testing.assert_close(ensemble(torch.tensor([[2.0, 3.0]])), torch.tensor([[2.0, -1.5]]))


def test_pruned_is_the_same_function_and_smaller():
    first, second = pair()
    ensemble = Ensemble([first, second, linear([[7.0, 7.0], [7.0, 7.0]])], [0.5, 0.5, 0.0], names=["a", "b", "c"])
    x = torch.rand(5, 2)
    pruned = ensemble.pruned()
    torch.testing.assert_close(pruned(x), ensemble(x))
    assert pruned.names == ("a", "b")
    assert (ensemble.size_mb, pruned.size_mb) == (48e-6, 32e-6)


def test_state_dict_round_trip_and_precision():
    ensemble = Ensemble(pair(), [0.1, 0.9], [2.0, 5.0])
    other = Ensemble(pair(), [0.5, 0.5])
    other.load_state_dict(ensemble.state_dict())
    assert other.weights.dtype == torch.float64
    assert torch.equal(other.weights, ensemble.weights)
    x = torch.rand(3, 2)
    assert torch.equal(other(x), ensemble(x))
    assert ensemble.double()(x.double()).dtype == torch.float64


def test_export_gives_the_same_logits():
    pool = [build("A", (1, 28, 28), seed=0), build("conv 4 3x3/1, fc 10", (1, 28, 28), seed=1)]
    ensemble = Ensemble(pool, [0.4, 0.6], [1.5, 0.7])
    x = torch.rand(3, 1, 28, 28)
    program = torch.export.export(ensemble, (x,))
    torch.testing.assert_close(program.module()(x), ensemble(x))


def test_gradients_reach_input_and_members():
    ensemble = Ensemble(pair(), [0.5, 0.5])
    x = torch.rand(2, 2, requires_grad=True)
    ensemble(x).sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None for p in ensemble.parameters())


def test_members_are_put_into_evaluation_mode():
    member = nn.Sequential(nn.Dropout(0.5), linear([[1.0, 0.0], [0.0, 1.0]])).train()
    ensemble = Ensemble([member], [1.0])
    x = torch.rand(4, 2)
    assert torch.equal(ensemble(x), member[1](x))


@pytest.mark.parametrize(
    ("weights", "scales", "message"),
    [
        ([0.5, 0.6], None, "weights sum to 1.1"),
        ([-0.5, 1.5], None, "none negative"),
        ([1.0], None, "weights has shape"),
        ([float("nan"), 1.0], None, "finite"),
        ("ab", None, "weights='ab'"),
        ([0.5, 0.5], [1.0, 0.0], "scales has lowest value 0"),
        ([0.5, 0.5], [1.0, -2.0], "above zero"),
        ([0.5, 0.5], [1.0], "scales has shape"),
    ],
)
def test_bad_numbers(weights, scales, message):
    with pytest.raises(InputError, match=message):
        Ensemble(pair(), weights, scales)


def test_bad_pool_and_names():
    with pytest.raises(InputError, match="empty"):
        Ensemble([], [])
    with pytest.raises(InputError, match="holds a str"):
        Ensemble([pair()[0], "net.safetensors"], [0.5, 0.5])
    with pytest.raises(InputError, match="names has 1"):
        Ensemble(pair(), [0.5, 0.5], names=["a"])
