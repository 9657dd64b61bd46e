"""Rounded columns: a hand-computed case, brute force over signs, mixtures, and values at the edge of the type."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robboost.errors import InputError
from robboost.rounding import decode_columns, round_columns


def test_hand_computed_float16():
    # Near 1 float16 has steps of 2^-10: 1 + 2^-12 rounds to 1, so the change is 2^-12; 0.5 is exact.
    rounded = round_columns(torch.tensor([[1 + 2.0**-12, 0.5]], dtype=torch.float64), "float16", norm="linf")
    assert rounded.values.tolist() == [[1.0, 0.5]]
    assert 2.0**-12 <= float(rounded.errors) <= 2.0**-12 * (1 + 1e-12)


def test_hand_computed_int8():
    rounded = round_columns(torch.tensor([[127.0, -1.0, 0.25]], dtype=torch.float64), "int8", norm="linf")
    assert rounded.values.tolist() == [[127, -1, 0]]
    assert rounded.scales.tolist() == [1.0]
    assert 0.25 <= float(rounded.errors) <= 0.25 * (1 + 1e-12)


def test_exact_values_cost_nothing():
    columns = torch.tensor([[0.5, -2.0, 0.0]])
    for storage in ("float64", "float32", "float16"):
        assert float(round_columns(columns, storage, norm="linf").errors) == 0
    zeros = round_columns(torch.zeros(1, 3), "int8", norm="linf")
    assert float(zeros.errors) == 0
    assert decode_columns(zeros.values, zeros.scales).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_error_bounds_every_attack_by_brute_force(storage, norm):
    generator = torch.Generator().manual_seed(3)
    d = 5
    columns = torch.randn(40, d, dtype=torch.float64, generator=generator)
    rounded = round_columns(columns, storage, norm=norm)
    decoded = decode_columns(rounded.values, rounded.scales).double()
    if norm == "linf":
        moves = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=d)), dtype=torch.float64)
    elif norm == "l1":
        moves = torch.cat([torch.eye(d), -torch.eye(d)]).double()
    else:
        raw = torch.randn(4000, d, dtype=torch.float64, generator=generator)
        moves = torch.cat(
            [raw / raw.norm(dim=1, keepdim=True), (columns - decoded) / (columns - decoded).norm(dim=1, keepdim=True)]
        )
    worst = ((columns - decoded) @ moves.T).amax(1)
    assert bool((worst <= rounded.errors).all())
    # Not loose: some attack comes within a factor of the bound.
    assert bool((worst >= 0.5 * rounded.errors).all())


@given(st.integers(0, 10**6), st.sampled_from(["float32", "float16", "int8"]), st.floats(-30, 30))
@settings(max_examples=60, deadline=None)
def test_margin_of_every_mix_stays_below_the_exact_one(seed, storage, exponent):
    """c - e with rounded columns never certifies more than c with the exact ones, also where columns cancel."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(3, 4, 9, dtype=torch.float64, generator=generator) * 2.0**exponent
    columns[1] = -columns[0] * (1 + 1e-4)
    c = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    rounded = round_columns(columns, storage, norm="linf")
    decoded = decode_columns(rounded.values, rounded.scales).double()
    for a in torch.distributions.Dirichlet(torch.ones(3, dtype=torch.float64)).sample((8,)):
        exact = a @ c - torch.einsum("t,tnd->nd", a, columns).abs().sum(1)
        sound = a @ (c - rounded.errors) - torch.einsum("t,tnd->nd", a, decoded).abs().sum(1)
        assert bool((sound <= exact + 1e-13 * (1 + exact.abs())).all())


def test_values_beyond_float16_are_clamped_and_paid_for():
    rounded = round_columns(torch.tensor([[1e6]]), "float16", norm="linf")
    assert float(rounded.values) == 65504
    assert float(rounded.errors) >= 1e6 - 65504


def test_refusals_name_the_value():
    with pytest.raises(InputError, match="storage='int4'"):
        round_columns(torch.ones(1, 1), "int4", norm="linf")
    with pytest.raises(InputError, match="nan"):
        round_columns(torch.tensor([[1.0, float("nan")]]), "float16", norm="linf")
    with pytest.raises(InputError, match="norm='l3'"):
        round_columns(torch.ones(1, 1), "float16", norm="l3")
