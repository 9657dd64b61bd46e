"""Wilson's interval and McNemar's test against printed values and brute force."""

import itertools

import pytest
import torch
from scipy.stats import binomtest

from robboost import InputError
from robboost.intervals import Share, paired_test, wilson


def test_wilson_against_scipy():
    for total in (1, 7, 100, 10_000):
        for count in {0, 1, total // 3, total}:
            reference = binomtest(count, total).proportion_ci(method="wilson")
            assert wilson(count, total) == pytest.approx((reference.low, reference.high), abs=1e-12)


def test_wilson_edges():
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 50)[0] == 0.0
    assert wilson(50, 50)[1] == 1.0
    with pytest.raises(InputError, match="count=3"):
        wilson(3, 2)


def test_share_prints_percent():
    assert f"{Share(1, 8)}" == "12.50"
    assert f"{Share(0, 100):i}" == "0.00 [0.00, 3.70]"
    assert f"{Share(0, 0)}" == "-"


def test_paired_p_value_by_counting_all_splits():
    first = torch.tensor([True] * 7 + [False] * 2 + [True, False])
    second = torch.tensor([False] * 7 + [True] * 2 + [True, False])
    splits = list(itertools.product((0, 1), repeat=9))
    as_uneven = sum(abs(2 * sum(split) - 9) >= 5 for split in splits)
    result = paired_test(first, second)
    assert (result.only_first_fails, result.only_second_fails) == (7, 2)
    assert result.p_value == pytest.approx(as_uneven / len(splits))
    assert result.difference == -5


def test_paired_against_scipy_and_edges():
    for one, two in [(0, 0), (1, 0), (5, 5), (30, 12), (400, 300)]:
        masks = torch.tensor([[True, False]] * one + [[False, True]] * two + [[True, True]] * 3)
        reference = binomtest(one, one + two).pvalue if one + two else 1.0
        assert paired_test(masks[:, 0], masks[:, 1]).p_value == pytest.approx(reference, rel=1e-9)
    with pytest.raises(InputError, match="failure masks"):
        paired_test(torch.zeros(3, dtype=torch.bool), torch.zeros(4, dtype=torch.bool))
