"""The exact minimum of a margin over a threat set by mixed-integer programming (HiGHS), for tiny networks.

Shares nothing with the engine: modules are walked one by one, affine ones are turned into matrices by feeding them the
unit vectors, and each ReLU, LeakyReLU and max pooling becomes binaries with big-M constants from interval arithmetic.
An l_2 ball is approached by cutting planes: the program is solved again with a tangent plane until its point is in the
ball (exact up to four inputs; with more, the few planes that are taken leave a gap between the two values returned).
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from networks_for_bounds import Normalised, Skip
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import nn


@dataclass
class Expression:
    """Affine functions of the program's variables: coefficients [variables, *shape] and constants [*shape]."""

    slope: torch.Tensor
    constant: torch.Tensor

    def padded(self, count):
        missing = count - len(self.slope)
        return torch.cat([self.slope, self.slope.new_zeros((missing, *self.slope.shape[1:]))])


@dataclass
class Program:
    lower: list = field(default_factory=list)
    upper: list = field(default_factory=list)
    integer: list = field(default_factory=list)
    rows: list = field(default_factory=list)  # (coefficients by variable, upper limit)

    def variable(self, lower, upper, integer=0):
        self.lower.append(float(lower))
        self.upper.append(float(upper))
        self.integer.append(integer)
        return len(self.lower) - 1

    def at_most(self, row, limit):
        self.rows.append((row, float(limit)))

    def interval(self, slope, constant):
        low, high = (torch.tensor(side, dtype=torch.float64)[: len(slope)] for side in (self.lower, self.upper))
        positive, negative = slope.clamp(min=0), slope.clamp(max=0)
        return constant + positive @ low + negative @ high, constant + positive @ high + negative @ low

    def minimum(self, slope, constant):
        """(least value, variables) of an affine function."""
        count = len(self.lower)
        matrix, limits = np.zeros((len(self.rows), count)), np.empty(len(self.rows))
        for i, (row, limit) in enumerate(self.rows):
            for variable, coefficient in row.items():
                matrix[i, variable] += coefficient
            limits[i] = limit
        cost = np.zeros(count)
        cost[: len(slope)] = slope.numpy()
        solved = milp(
            cost,
            integrality=self.integer,
            bounds=Bounds(self.lower, self.upper),
            constraints=LinearConstraint(matrix, ub=limits) if self.rows else (),
            options={"mip_rel_gap": 0.0, "time_limit": 60.0},
        )
        assert solved.status == 0, solved.message
        return solved.fun + float(constant), solved.x


def _row(slope, sign=1.0):
    return {int(i): sign * float(slope[i]) for i in slope.nonzero()[:, 0]}


def _rectified(program, value, negative):
    """max(z, negative * z), value by value."""
    flat, constants = value.slope.flatten(1), value.constant.flatten()
    parts = []
    for slope, constant in zip(flat.T, constants, strict=True):
        low, high = (float(end) for end in program.interval(slope, constant))
        if low >= 0 or high <= 0:
            factor = 1.0 if low >= 0 else negative
            parts.append((factor * slope, factor * constant))
            continue
        out, on = program.variable(negative * low, high), program.variable(0, 1, 1)
        program.at_most({**_row(slope), out: -1.0}, -constant)  # out >= z
        program.at_most({**_row(negative * slope), out: -1.0}, -negative * constant)  # out >= negative * z
        # out <= z - (1 - negative) low (1 - on), out <= negative * z + (1 - negative) high * on
        gap = 1 - negative
        program.at_most({**_row(slope, -1.0), out: 1.0, on: -gap * low}, constant - gap * low)
        program.at_most({**_row(negative * slope, -1.0), out: 1.0, on: -gap * high}, negative * constant)
        unit = torch.zeros(out + 1, dtype=torch.float64)
        unit[out] = 1.0
        parts.append((unit, torch.zeros((), dtype=torch.float64)))
    return _stacked(program, parts, value.constant.shape)


def _stacked(program, parts, shape):
    slope = torch.zeros((len(program.lower), len(parts)), dtype=torch.float64)
    for column, (part, _) in enumerate(parts):
        slope[: len(part), column] = part
    return Expression(slope.unflatten(1, shape), torch.stack([constant for _, constant in parts]).view(shape))


def _pooled(program, value, module):
    """The largest value of each window; `module` names the values of each by pooling their numbers' one-hot maps."""
    channels, height, width = value.constant.shape
    numbers = torch.arange(height * width, dtype=torch.float64).view(1, 1, height, width) + 1
    windows = F.unfold(numbers, module.kernel_size, padding=module.padding, stride=module.stride)[0].long().T
    flat, constants = value.slope.flatten(1), value.constant.flatten()
    parts = []
    for channel in range(channels):
        for window in windows:
            members = [channel * height * width + int(number) - 1 for number in window if number > 0]
            ends = [program.interval(flat[:, m], constants[m]) for m in members]
            highest = max(float(high) for _, high in ends)
            out = program.variable(max(float(low) for low, _ in ends), highest)
            chosen = [program.variable(0, 1, 1) for _ in members]
            program.at_most(dict.fromkeys(chosen, -1.0), -1.0)
            for m, (low, _), pick in zip(members, ends, chosen, strict=True):
                program.at_most({**_row(flat[:, m]), out: -1.0}, -constants[m])
                room = highest - float(low)
                program.at_most({**_row(flat[:, m], -1.0), out: 1.0, pick: room}, constants[m] + room)
            unit = torch.zeros(out + 1, dtype=torch.float64)
            unit[out] = 1.0
            parts.append((unit, torch.zeros((), dtype=torch.float64)))
    shape = module(torch.zeros(1, channels, height, width, dtype=torch.float64)).shape[1:]
    return _stacked(program, parts, shape)


def _affine(function, value):
    zero = function(torch.zeros_like(value.constant)[None])
    return Expression(function(value.slope) - zero, function(value.constant[None])[0])


def encode(program, module, value):
    if isinstance(module, nn.Sequential):
        for part in module:
            value = encode(program, part, value)
        return value
    if isinstance(module, Normalised):
        inner = encode(program, module.network, _affine(lambda x: (x - module.mean) / module.std, value))
        return _affine(lambda x: 2.0 * x - 1.0, inner)
    if isinstance(module, Skip):
        body, skip = encode(program, module.body, value), encode(program, module.skip, value)
        count = len(program.lower)
        total = Expression(body.padded(count) + skip.padded(count), body.constant + skip.constant)
        return _rectified(program, total, 0.0)
    if isinstance(module, nn.ReLU):
        return _rectified(program, value, 0.0)
    if isinstance(module, nn.LeakyReLU):
        return _rectified(program, value, module.negative_slope)
    if isinstance(module, nn.MaxPool2d):
        return _pooled(program, value, module)
    return _affine(module, value)


def _inputs(program, x, threat):
    """The input as expressions, and the variables of an l_2 deviation (else empty)."""
    size, eps = x.numel(), threat.eps
    if threat.norm == "l1":
        plus = [program.variable(0, eps) for _ in range(size)]
        minus = [program.variable(0, eps) for _ in range(size)]
        program.at_most(dict.fromkeys(plus + minus, 1.0), eps)
        eye = torch.eye(size, dtype=torch.float64)
        return Expression(torch.cat([eye, -eye]).unflatten(1, x.shape), x), []
    low, high = torch.full_like(x, -eps), torch.full_like(x, eps)
    if threat.norm == "linf" and threat.clip is not None:
        low, high = torch.maximum(low, threat.clip[0] - x), torch.minimum(high, threat.clip[1] - x)
    found = [program.variable(a, b) for a, b in zip(low.flatten(), high.flatten(), strict=True)]
    slope = torch.eye(size, dtype=torch.float64).unflatten(1, x.shape)
    return Expression(slope, x), (found if threat.norm == "l2" else [])


@torch.no_grad()
def exact_minima(model, x, label, threat):
    """[(least margin as the program states it, the true margin at the program's point)] for each other class.

    The point lies in the threat set, so that the true minimum is between the two (up to the program's tolerances).
    """
    program = Program()
    value, deviation = _inputs(program, x, threat)
    logits = encode(program, model, value)
    slope, constant = logits.padded(len(program.lower)), logits.constant
    classes = len(constant)
    found = []
    for target in range(classes):
        if target == label:
            continue
        margin = slope[:, label] - slope[:, target], constant[label] - constant[target]
        for _ in range(200 if x.numel() <= 4 else 2):
            least, solution = program.minimum(*margin)
            shift = torch.tensor(solution)
            point = value.constant + torch.einsum("v...,v->...", value.slope, shift[: len(value.slope)])
            point = threat.project(point[None], x[None])
            out = model(point)[0]
            true = float(out[label] - out[target])
            if not deviation or true - least < 1e-6:
                break
            step = shift[deviation]
            program.at_most(dict(zip(deviation, (step / step.norm()).tolist(), strict=True)), threat.eps)
        found.append((least, true))
    return found
