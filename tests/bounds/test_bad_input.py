"""Every wrong argument is refused with one clear line, before anything is computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import robboost as rb
from robboost import Threat, margin_bounds
from robboost.bounds import Options
from robboost.errors import CheckpointError, InputError, RobBoostError, UnsupportedOperationError

X, Y, THREAT = torch.full((2, 3), 0.5), torch.tensor([0, 1]), Threat(0.1, clip=(0.0, 1.0))


def model(scale=1.0):
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    network[0].weight.data *= scale
    return network


def spoilt(value):
    pixels = X.clone()
    pixels[1, 2] = value
    return pixels


def one_line(error):
    return "\n" not in str(error.value) and isinstance(error.value, RobBoostError)


CALLS = {
    "images of the wrong shape": (lambda: margin_bounds(model(), torch.rand(2, 5), Y, THREAT), r"shape \[5\]"),
    "no image": (lambda: margin_bounds(model(), X[:0], Y[:0], THREAT), r"x has shape \[0, 3\]"),
    "no batch axis": (lambda: margin_bounds(model(), X[0], Y[:1], THREAT), r"x has shape \[3\]"),
    "bytes": (lambda: margin_bounds(model(), (255 * X).byte(), Y, THREAT), r"torch.uint8.*divide 8-bit pixels by 255"),
    "half precision": (lambda: margin_bounds(model(), X.half(), Y, THREAT), "x is torch.float16"),
    "no tensor": (lambda: margin_bounds(model(), X.tolist(), Y, THREAT), "x is list"),
    "NaN pixel": (lambda: margin_bounds(model(), spoilt(torch.nan), Y, THREAT), "x holds NaN or infinite pixels"),
    "infinite pixel": (lambda: margin_bounds(model(), spoilt(torch.inf), Y, THREAT), "x holds NaN or infinite pixels"),
    "pixel outside the box": (lambda: margin_bounds(model(), spoilt(1.5), Y, THREAT), r"from 0.5 to 1.5, .*\[0, 1\]"),
    "label too large": (lambda: margin_bounds(model(), X, Y + 1, THREAT), "labels from 1 to 2, expected 0 to 1"),
    "label below zero": (lambda: margin_bounds(model(), X, Y - 1, THREAT), "labels from -1 to 0, expected 0 to 1"),
    "labels as numbers": (lambda: margin_bounds(model(), X, Y.float(), THREAT), "y is torch.float32"),
    "labels of another count": (lambda: margin_bounds(model(), X, Y[:1], THREAT), "expected 2 integer labels"),
    "NaN weight": (lambda: margin_bounds(model(torch.nan), X, Y, THREAT), "NaN or infinite parameters"),
    "infinite weight": (lambda: margin_bounds(model(torch.inf), X, Y, THREAT), "NaN or infinite parameters"),
    "one class": (lambda: margin_bounds(nn.Linear(3, 1).eval(), X, Y * 0, THREAT), "expected two or more logits"),
    "no module": (lambda: margin_bounds(lambda x: x, X, Y, THREAT), "model is a function"),
    "no threat": (lambda: margin_bounds(model(), X, Y, 0.1), "threat is a float"),
    "unknown method": (lambda: margin_bounds(model(), X, Y, THREAT, "deeppoly"), "method='deeppoly'.*'crown'"),
    "unknown precision": (lambda: margin_bounds(model(), X, Y, THREAT, precision="tf32"), "precision='tf32'"),
    "unknown part": (
        lambda: margin_bounds(model(), X, Y, THREAT, "tightest", options=Options(parts=("crown", "x"))),
        r"parts=\('crown', 'x'\)",
    ),
    "no part": (lambda: margin_bounds(model(), X, Y, THREAT, "tightest", options=Options(parts=())), r"parts=\(\)"),
    "negative iterations": (lambda: margin_bounds(model(), X, Y, THREAT, options=Options(iterations=-1)), "iterations"),
    "unknown norm": (lambda: Threat(0.1, "l3"), "norm='l3'"),
    "negative eps": (lambda: Threat(-0.1), "eps=-0.1"),
    "absurd eps": (lambda: Threat(8, clip=(0, 1)), "eps=8: larger than the whole pixel range.*'8/255'"),
}


@pytest.mark.parametrize("what", CALLS)
def test_wrong_arguments(what):
    call, message = CALLS[what]
    with pytest.raises(InputError, match=message) as error:
        call()
    assert one_line(error)


class Custom(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x))


OPERATIONS = {
    "softmax": (lambda z: torch.softmax(z, 1), r"aten.softmax at .*softmax.* has no bound rule"),
    "product of two flows": (lambda z: z * z, "aten.mul at .*both of its factors"),
    "mean over the batch": (lambda z: z - z.mean(0), "aten.mean at"),
    "exponential": (torch.exp, "aten.exp at"),
    "slice assignment": (lambda z: z.index_fill(1, torch.tensor([0]), 0.0), "aten.index_fill at"),
    "half precision": (lambda z: z.half().float(), "converts to torch.float16"),
    "two outputs": (lambda z: (z, z), "expected one tensor of logits"),
    "constant output": (lambda z: torch.zeros(2, 2), "does not depend on its input|batch"),
    "steep leaky relu": (lambda z: F.leaky_relu(z, 1.5), "slope 1.5 for negative inputs"),
}


@pytest.mark.parametrize("what", OPERATIONS)
def test_unsupported_operations_are_named_with_their_place(what):
    function, message = OPERATIONS[what]
    with pytest.raises((UnsupportedOperationError, InputError), match=message) as error:
        margin_bounds(Custom(function).eval(), X, Y, THREAT)
    assert one_line(error)


def test_the_place_names_the_submodule():
    network = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.GELU(), nn.Linear(4, 2))).eval()
    with pytest.raises(UnsupportedOperationError, match=r"aten\.gelu at 1\.0 \(gelu\) has no bound rule"):
        margin_bounds(network, X, Y, THREAT)


def test_a_negative_divisor_of_pooling_is_refused():
    """It would turn lower bounds into upper ones."""

    class Pool(nn.Module):
        def forward(self, x):
            return F.avg_pool2d(x, (1, 2), divisor_override=-2).flatten(1)

    with pytest.raises(UnsupportedOperationError, match="divisor -2 is not above zero"):
        margin_bounds(Pool().eval(), torch.rand(2, 1, 1, 4), Y, THREAT)


@pytest.mark.parametrize("content", [b"", b"nothing", b"\x80\x00\x00\x00\x00\x00\x00\x00{"])
@pytest.mark.parametrize("suffix", ["safetensors", "onnx", "pt2"])
def test_unreadable_and_truncated_checkpoints(suffix, content, tmp_path):
    path = tmp_path / f"net.{suffix}"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=path.name) as error:
        rb.load_model(path)
    assert one_line(error)
