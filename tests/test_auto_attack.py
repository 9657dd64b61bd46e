"""AutoAttack from its own package: it finds what PGD misses, stays in the set, and leaves the process as it was."""

import logging
import sys

import numpy as np
import pytest
import torch
from small_pools import examples, pool
from torch import nn

from robboost import Ensemble, InputError, Threat, attack, certify
from robboost.attacks import AttackSettings
from robboost.auto_attack import auto_attack, auto_attack_parts

POOL = pool()
X, Y = examples(6, seed=3)
WEAK = AttackSettings(steps=1, restarts=1, step=1e-3)


class Masked(nn.Module):
    """The same classes with gradients that are all zero: PGD sees nothing, the Square attack does not care."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return (self.network(x) * 3).round() + 0 * x.flatten(1).sum(1, keepdim=True)


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.25), ("l2", 1.2), ("l1", 5.0)])
def test_finds_more_and_stays_in_the_set(norm, eps):
    ensemble = Ensemble(POOL, [0.5, 0.3, 0.2])
    threat = Threat(eps, norm, (0, 1))
    state, tracer = torch.random.get_rng_state(), sys.gettrace()
    weak = attack(ensemble, X, Y, threat, settings=WEAK)
    strong = attack(ensemble, X, Y, threat, settings=AttackSettings(1, 1, step=1e-3, autoattack="apgd-ce"))
    assert strong.success.sum() > weak.success.sum()
    assert (strong.margins <= weak.margins).all()
    assert threat.contains(strong.adversarial, X.double(), tolerance=1e-12).all()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sys.gettrace() is tracer
    assert "AutoAttack (apgd-ce)" in str(strong)


def test_square_needs_no_gradient():
    threat = Threat(0.3, clip=(0, 1))
    settings = AttackSettings(steps=2, restarts=1)
    blind = attack(Masked(POOL[0]), X[:6], Y[:6], threat, settings=settings)
    seen = attack(Masked(POOL[0]), X[:6], Y[:6], threat, settings=AttackSettings(2, 1, autoattack="square"))
    assert seen.success.sum() > blind.success.sum()


def test_certified_examples_withstand_it():
    threat = Threat(0.1, clip=(0, 1))
    ensemble = Ensemble(POOL, [0.5, 0.3, 0.2])
    certificate = certify(ensemble, X, Y, threat, method="ibp+crown")
    assert certificate.certified.any()
    found = attack(ensemble, X, Y, threat, settings=AttackSettings(1, 1, autoattack="apgd-ce+fab"),
                   certified=certificate.certified)  # fmt: skip
    assert certificate.verified_error >= found.error >= certificate.clean_error


def test_parts():
    assert auto_attack_parts("") == ()
    assert auto_attack_parts("standard") == ("apgd-ce", "apgd-t", "fab-t", "square")
    assert auto_attack_parts("fab + square") == ("fab", "square")
    with pytest.raises(InputError, match="autoattack='luck'"):
        AttackSettings(autoattack="luck")
    assert torch.equal(auto_attack(POOL[0], X, Y, Threat(0.0, clip=(0, 1)), "apgd-ce", seed=0), X)


def test_what_it_cannot_do_is_refused(monkeypatch):
    settings = AttackSettings(1, 1, autoattack="apgd-t")
    with pytest.raises(InputError, match="clip=None"):
        attack(POOL[0], X, Y, Threat(0.1), settings=settings)
    flat = nn.Linear(4, 3)
    with pytest.raises(InputError, match=r"expected \[C, H, W\]"):
        attack(flat, np.zeros((2, 4), np.float32), np.array([0, 1]), Threat(0.1, clip=(0, 1)), settings=settings)
    with pytest.raises(InputError, match="works with 3 classes"):
        attack(POOL[0], X, Y, Threat(0.01, clip=(0, 1)), settings=settings)
    assert logging.getLogger("auto-attack").level == logging.NOTSET
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    with pytest.raises(InputError, match="pip install"):
        attack(POOL[0], X, Y, Threat(0.1, clip=(0, 1)), settings=settings)
