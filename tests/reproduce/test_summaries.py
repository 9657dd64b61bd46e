"""Counts of pairs, histogram and packed verdicts, against hand-computed cases."""

import math

import pytest
import torch

from robboost.mixtures import mix_margins
from robboost.reproduce.summaries import above_zero, eliminated, histogram, packed, unpacked


def test_pairs_and_examples_that_are_eliminated():
    members = torch.tensor([[[1.0, 2.0], [1.0, -1.0], [-1.0, -1.0]], [[3.0, 0.5], [2.0, 1.0], [-2.0, -0.5]]])
    mix = torch.tensor([[2.0, 1.0], [1.5, 0.2], [0.1, -0.3]])
    found = eliminated(members, mix)
    assert found == {
        "pairs": 6,
        "pairs_robust_to_all": 3,
        "pairs_robust_to_none": 2,
        "pairs_none_but_mix": 1,
        "examples": 3,
        "examples_robust_to_all": 1,
        "examples_robust_to_none": 1,
    }


def test_a_pair_that_no_member_certifies_can_be_certified_by_the_mix():
    """A = [2, -2], c = [1, 1]: both members alone have margin -1, the half-half mix has +1."""
    slopes = torch.tensor([2.0, -2.0]).view(2, 1, 1, 1)
    intercepts = torch.ones(2, 1, 1, dtype=torch.float64)
    radius = torch.ones(1, 1, dtype=torch.float64)
    margin = [
        mix_margins(slopes, intercepts, radius, torch.tensor(mix), norm="linf").lower
        for mix in ([1.0, 0.0], [0.0, 1.0], [0.5, 0.5])
    ]
    assert [round(float(m), 9) for m in margin] == [-1.0, -1.0, 1.0]
    assert eliminated(torch.stack(margin[:2]), margin[2])["pairs_none_but_mix"] == 1


def test_a_margin_of_zero_and_nan_are_not_robust():
    found = eliminated(torch.tensor([[[0.0, math.nan]]]), torch.tensor([[0.0, math.nan]]))
    assert found["pairs_robust_to_none"] == 2
    assert found["pairs_none_but_mix"] == 0


def test_histogram_counts_every_pair_and_splits_exactly_at_zero():
    generator = torch.Generator().manual_seed(0)
    margins = {
        name: torch.randn(50, 9, generator=generator) + shift for name, shift in (("uniform", 0), ("RobBoost", 1))
    }
    margins["uniform"][0, :3] = torch.tensor([0.0, math.nan, -1e9])
    found = histogram(margins)
    assert 0.0 in found["edges"]
    assert len(found["edges"]) == len(found["counts"]["uniform"]) + 1
    for name, values in margins.items():
        assert sum(found["counts"][name]) == 450
        assert above_zero(found)[name] == pytest.approx(float((values > 0).double().mean()))


@pytest.mark.parametrize("values", [[3.0, 4.0, 5.0], [-3.0, -4.0, -5.0], [math.nan], [0.0, 0.0]])
def test_histogram_of_one_sign(values):
    tensor = torch.tensor([values])
    found = histogram({"uniform": tensor})
    assert sum(found["counts"]["uniform"]) == len(values)
    assert above_zero(found)["uniform"] == float((tensor > 0).double().mean())


def test_verdicts_come_back():
    mask = torch.rand(37, generator=torch.Generator().manual_seed(1)) < 0.5
    assert torch.equal(unpacked(packed(mask), 37), mask)
    assert packed(torch.tensor([True] + 7 * [False])) == "80"
