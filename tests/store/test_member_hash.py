"""Attacks on the hash of a member: two that compute something else, made to look alike in every way that is cheap."""

import copy
import functools
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import fx, nn

from robboost.errors import InputError
from robboost.models import demo_pool
from robboost.store import hash_member


@dataclass
class _Settings:
    scale: float


class _Member(nn.Module):
    step = 1.0

    def __init__(self, **attributes: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(2, 2)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(self.inner(x)) * self.step

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class _OtherHelper(_Member):
    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class _OtherStep(_Member):
    step = 2.0


class _Same(_Member):
    pass


for _kind in (_OtherHelper, _OtherStep, _Same):
    _kind.__qualname__ = "_Same"


def _closure(factor):
    return lambda x: x * factor


def _default(factor):
    def scaled(x, by=factor):
        return x * by

    return scaled


def _keyword(factor):
    def scaled(x, *, by=factor):
        return x * by

    return scaled


def _hooked(factor):
    member = _Member()
    member.inner.register_forward_hook(lambda module, inputs, output: output * factor)
    return member


def _own_forward(factor):
    member = _Member()
    member.forward = types.MethodType(lambda self, x: self.inner(x) * factor, member)
    return member


def _listed(factor):
    hidden = nn.Linear(2, 2)
    with torch.no_grad():
        hidden.weight.fill_(factor)
        hidden.bias.fill_(0)
    return _Member(hidden=[hidden])


class _Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


MAKERS = {
    "object with fields": lambda f: _Member(c=_Settings(f)),
    "numpy array": lambda f: _Member(c=np.full(2, f)),
    "numpy number": lambda f: _Member(c=np.float32(f)),
    "partial": lambda f: _Member(c=functools.partial(torch.mul, other=f)),
    "closure": lambda f: _Member(c=_closure(f)),
    "default": lambda f: _Member(c=_default(f)),
    "keyword default": lambda f: _Member(c=_keyword(f)),
    "bound method of an object": lambda f: _Member(c=_Settings(f).__eq__),
    "function among several": lambda f: _Member(c={"a": [torch.relu, torch.tanh if f > 2 else torch.sigmoid]}),
    "hook": _hooked,
    "forward of the instance": _own_forward,
    "module hidden in a list": _listed,
    "traced graph": lambda f: fx.symbolic_trace(_Times(f)),
    "exported program": lambda f: torch.export.export(_Times(f).eval(), (torch.ones(1, 2),)).module(),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_computes_something_else_has_another_hash(kind):
    make = MAKERS[kind]
    assert hash_member(make(2.0)) == hash_member(make(2.0))
    assert hash_member(make(2.0)) != hash_member(make(3.0))


def test_code_and_attributes_of_the_class_count_under_the_same_name():
    kinds = (_Same, _OtherHelper, _OtherStep)
    assert len({hash_member(kind()) for kind in kinds}) == 3


def test_cycles_end_and_copies_are_the_same():
    member = _Member()
    child = _Member(parent=[member])
    member.friends = [child, member]
    member.child = child
    assert hash_member(member) == hash_member(copy.deepcopy(member))
    for known in demo_pool().models:
        assert hash_member(known) == hash_member(copy.deepcopy(known))


def test_what_cannot_be_seen_is_refused_by_name():
    with pytest.raises(InputError, match=r"attribute 'c' holds a builtins\.object that cannot be told from another"):
        hash_member(nn.Sequential(_Member(c=object())))
