"""A trace stands for the module as it is now: changed attributes, hooks and state are seen, randomness is refused."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from robboost import Threat, margin_bounds
from robboost.errors import InputError, UnsupportedOperationError
from robboost.models.fingerprint import fingerprint
from robboost.models.graph import trace


@dataclass
class Settings:
    factor: float = 1.0


class Configured(nn.Module):
    """A function that depends on attributes of many kinds."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.factor = 1.0
        self.mean = torch.zeros(2)
        self.table = {"gains": [1.0, 1.0]}
        self.settings = Settings()
        self.array = np.ones(2, np.float32)
        self.activation = nn.functional.leaky_relu
        self.flag = False

    def forward(self, x):
        z = self.layer(x - self.mean) * self.factor * self.settings.factor
        for gain in self.table["gains"]:
            z = z * gain
        if self.flag:
            z = -z
        return self.activation(z * float(self.array[0]))


def _in_place(model):
    model.mean.add_(0.5)


def _hook(model):
    model.layer.register_forward_hook(lambda module, inputs, output: 2 * output)


CHANGES = {
    "number": lambda model: setattr(model, "factor", -3.0),
    "tensor replaced": lambda model: setattr(model, "mean", torch.ones(2)),
    "tensor changed in place": _in_place,
    "nested container": lambda model: model.table["gains"].append(4.0),
    "plain object": lambda model: setattr(model.settings, "factor", 5.0),
    "array in place": lambda model: model.array.__setitem__(0, 3.0),
    "function": lambda model: setattr(model, "activation", torch.tanh),
    "flag": lambda model: setattr(model, "flag", True),
    "hook": _hook,
    "forward of the instance": lambda model: setattr(model, "forward", lambda x: 7 * model.layer(x)),
    "submodule": lambda model: setattr(model, "layer", nn.Sequential(nn.Linear(2, 2), nn.Tanh())),
    "parameters": lambda model: model.layer.weight.data.mul_(-2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_first_bound_is_seen(change):
    torch.manual_seed(0)
    model = Configured().eval()
    x, y, threat = torch.tensor([[0.8, 0.3]]), torch.tensor([0]), Threat(0.0)

    def agrees():
        bound = margin_bounds(model, x, y, threat).lower
        logits = model(x)
        return torch.allclose(bound, logits[:, :1] - logits[:, 1:], atol=1e-6)

    before = margin_bounds(model, x, y, threat).lower
    assert agrees()
    CHANGES[change](model)
    model.eval()
    assert agrees()
    assert not torch.allclose(before, margin_bounds(model, x, y, threat).lower)


def test_an_unchanged_module_is_traced_once():
    model = Configured().eval()
    assert trace(model, (2,)) is trace(model, (2,))
    program = torch.export.export(nn.Sequential(nn.Linear(2, 2)).eval(), (torch.zeros(1, 2),)).module()
    assert trace(program, (2,)) is trace(program, (2,))


def test_what_cannot_be_compared_is_traced_again():
    model = Configured().eval()
    with torch.inference_mode():
        model.mean = torch.zeros(2)  # such tensors do not count their changes
    assert fingerprint(model) != fingerprint(model)
    model.mean = torch.zeros(2)
    assert fingerprint(model) == fingerprint(model)
    model.table["many"] = [[number, [number]] for number in range(10000)]
    assert fingerprint(model) != fingerprint(model)


def test_modules_that_refer_to_themselves():
    model = Configured().eval()
    model.table["self"] = model.table
    model.parents = [model.settings, model.table]
    model.settings.owner = model
    assert fingerprint(model) == fingerprint(model)


class PythonRandom(Configured):
    def forward(self, x):
        return self.layer(x) * random.uniform(1, 2)


class Counter(Configured):
    calls = 0

    def forward(self, x):
        Counter.calls += 1
        return self.layer(x) * (-1) ** Counter.calls


class TorchRandom(Configured):
    def forward(self, x):
        return self.layer(x) + torch.randn(2)


class Noise(Configured):
    def forward(self, x):
        return self.layer(x) + torch.rand_like(x)


class Sampled(Configured):
    def forward(self, x):
        return self.layer(x * torch.bernoulli(torch.full((2,), 0.5)))


@pytest.mark.parametrize("kind", [PythonRandom, Counter, TorchRandom, Noise, Sampled])
def test_random_modules_are_refused(kind):
    with pytest.raises(UnsupportedOperationError, match=r"two answers|is random|has no bound rule") as caught:
        margin_bounds(kind().eval(), torch.ones(1, 2), torch.tensor([0]), Threat(0.1))
    assert "\n" not in str(caught.value)


def test_training_mode_is_refused_whole_or_in_part():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2)).eval()
    arguments = (torch.ones(1, 2), torch.tensor([0]), Threat(0.1))
    margin_bounds(model, *arguments)
    model.train()
    with pytest.raises(InputError, match=r"training mode.*model\.eval\(\)"):
        margin_bounds(model, *arguments)
    for part, name in ((1, "Dropout"), (2, "BatchNorm1d")):
        model.eval()
        model[part].train()
        with pytest.raises(InputError, match=rf"module {part} \({name}\) is in training mode.*model\.eval\(\)"):
            margin_bounds(model, *arguments)
