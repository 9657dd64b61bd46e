"""Voting against brute force over everything an attacker may make the members say; a cascade broken by a real point."""

import itertools

import pytest
import torch
from torch import nn

from robboost import InputError, Threat, margin_bounds
from robboost.combinations import Cascade, all_certify, some_certify, vote_certified, vote_verdicts


def brute_force(margins, correct, y, weights, classes):
    """Does y win strictly for every combination of classes that the members could be made to say?"""
    options = []
    for t in range(len(weights)):
        targets = [j for j in range(classes) if j != y]
        breakable = [j for j, margin in zip(targets, margins[t].tolist(), strict=True) if not margin > 0]
        options.append(([y, *breakable] if breakable else [y]) if correct[t] or breakable else targets)
    for said in itertools.product(*options):
        votes = [sum(w for w, s in zip(weights, said, strict=True) if s == j) for j in range(classes)]
        if any(votes[j] >= votes[y] for j in range(classes) if j != y):
            return False
    return True


def test_vote_equals_brute_force():
    generator = torch.Generator().manual_seed(0)
    yes = 0
    for trial in range(400):
        members, classes = 1 + trial % 5, 2 + trial % 3
        margins = torch.randn(members, 1, classes - 1, generator=generator) + 0.6
        correct = torch.rand(members, 1, generator=generator) < 0.9
        # Small integers, so that ties occur and sums are exact.
        weights = torch.randint(0, 4, (members,), generator=generator).double()
        y = torch.tensor([trial % classes])
        expected = brute_force(margins[:, 0], correct[:, 0].tolist(), int(y), weights.tolist(), classes)
        assert bool(vote_certified(margins, correct, y, weights)[0]) is expected
        yes += expected
    assert 50 < yes < 350


def test_a_wrong_member_with_positive_margins_counts_against():
    margins, y = torch.ones(2, 1, 2), torch.tensor([0])
    correct = torch.tensor([[True], [False]])
    assert not vote_certified(margins, correct, y, torch.tensor([0.4, 0.6]))
    assert vote_certified(margins, correct, y, torch.tensor([0.6, 0.4]))


def test_a_tied_vote_and_a_wrong_member():
    margins = torch.tensor([[[1.0]], [[-1.0]]])
    right = torch.ones(2, 1, dtype=torch.bool)
    y = torch.tensor([0])
    assert not vote_certified(margins, right, y, torch.tensor([0.5, 0.5]))
    assert vote_certified(margins, right, y, torch.tensor([0.6, 0.4]))
    with pytest.raises(InputError, match="weights="):
        vote_certified(margins, right, y, torch.tensor([1.5, -0.5]))
    with pytest.raises(InputError, match="margins"):
        vote_certified(margins[0], right, y, torch.tensor([0.5, 0.5]))


def test_vote_verdicts_by_hand():
    # Two of three say class 0 where x > 0; a point at -0.5 turns two of them, and 0.6 > 0.4 keeps the vote.
    members = [Steps(1.0, 0.0), Steps(1.0, 0.0), Steps(1.0, -9.0)]
    x, y, points = torch.tensor([[0.2], [-3.0]]), torch.tensor([0, 0]), [torch.tensor([[-0.5], [-3.0]])]
    for weights, attacked in (([0.3, 0.3, 0.4], [True, True]), ([0.2, 0.2, 0.6], [False, False])):
        found = vote_verdicts(members, torch.tensor(weights), x, y, points)
        assert found.clean.tolist() == [False, sum(weights[:2]) > 0.5]
        assert found.attacked.tolist() == attacked
    tie = vote_verdicts([Steps(1.0, 0.0), Steps(-1.0, 0.0)], torch.tensor([0.5, 0.5]), x, y, [])
    assert tie.clean.all()  # a tie is no answer


def test_oracles():
    certified = torch.tensor([[True, False, True], [False, False, True]])
    assert some_certify(certified).tolist() == [True, False, True]
    assert all_certify(certified).tolist() == [False, False, True]


class Steps(nn.Sequential):
    """logit_0 - logit_1 = scale * (x - at), on the line."""

    def __init__(self, scale, at):
        layer = nn.Linear(1, 2)
        layer.weight.data = torch.tensor([[scale], [0.0]])
        layer.bias.data = torch.tensor([-scale * at, 0.0])
        super().__init__(layer)
        self.eval()


def test_a_cascade_is_broken_by_a_real_point():
    # eps = 1. The first member says class 1 left of 0 and is sure from a distance of 1 on; the second always says 0.
    # At x = 0.8 the first is not sure, the second is sure of class 0: the cascade calls (0.8, class 0) certified.
    cascade = Cascade([Steps(1.0, 0.0), Steps(1.0, -9.0)], Threat(1.9), method="crown")
    x, y = torch.tensor([[-0.2]]), torch.tensor([0])
    answer, stage = cascade.answer(x)
    assert (answer.item(), stage.item()) == (0, 1)
    assert cascade.certified(x, y).all()
    # x' = -2.0 lies in the set (distance 1.8 < 1.9); there the first member is sure, of class 1.
    point = torch.tensor([[-2.0]])
    assert cascade.threat.contains(point, x).all()
    assert cascade.answer(point)[0].item() == 1
    assert cascade.fooled(x, y, point[None]).all()
    # Every member by itself tells the truth: the first does not certify x, and the second holds at x'.
    assert not (margin_bounds(cascade.pool[0], x, y, cascade.threat).lower > 0).any()
    assert cascade.pool[1](point).argmax(1).item() == 0


def test_cascade_without_a_sure_member_is_not_certified():
    cascade = Cascade([Steps(1.0, 0.0)], Threat(1.0), method="crown")
    answer, stage = cascade.answer(torch.tensor([[0.5], [2.0]]))
    assert stage.tolist() == [-1, 0]
    assert answer.tolist() == [0, 0]
    assert cascade.certified(torch.tensor([[0.5], [2.0], [-2.0]]), torch.tensor([0, 0, 0])).tolist() == [
        False,
        True,
        False,
    ]
    with pytest.raises(InputError, match="empty"):
        Cascade([], Threat(1.0), method="crown")
