"""Full precision whatever the global switches say, and the caller's switches untouched."""

from __future__ import annotations

import threading

import pytest
import torch
from networks_for_bounds import NETWORKS, build
from torch import nn

from robboost import Threat, margin_bounds
from robboost.bounds import backward
from robboost.bounds.arithmetic import full_precision
from robboost.models import architectures

SWITCHES = {
    "nothing": lambda: None,
    "matmul precision medium": lambda: torch.set_float32_matmul_precision("medium"),
    "matmul precision high": lambda: torch.set_float32_matmul_precision("high"),
    "TF32 in products": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "TF32 in convolutions": lambda: setattr(torch.backends.cudnn, "allow_tf32", True),
}


def state():
    """All that could lower the precision of float32, as a caller reads it."""
    backends = torch.backends
    holders = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    found = [torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32]
    found += [getattr(holder, "fp32_precision", None) for holder in holders]
    return [*found, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), torch.get_default_dtype()]


@pytest.fixture(autouse=True)
def restored():
    """Every test leaves the process as it found it."""
    before = (
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
    )
    yield
    torch.backends.cudnn.allow_tf32 = before[2]
    torch.set_float32_matmul_precision(before[0])


MODEL, SHAPE = build("conv")
MODEL.float()
X = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(0))


def bounds_of(method="crown", precision="float32"):
    return margin_bounds(MODEL, X, torch.tensor([0, 1, 2]), Threat(0.1), method, precision=precision)


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_change_nothing_and_are_not_changed(switch):
    expected = bounds_of()
    SWITCHES[switch]()
    before = state()
    found = bounds_of()
    assert state() == before
    assert torch.equal(found.slope, expected.slope)
    assert torch.equal(found.lower, expected.lower)


@pytest.mark.parametrize("switch", SWITCHES)
def test_inside_everything_is_at_its_highest(switch):
    SWITCHES[switch]()
    with full_precision(), full_precision():
        if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
            for holder in (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul):
                assert holder.fp32_precision == "ieee"
        # The older switches say the same (PyTorch refuses to read them where they do not).
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("method", ["ibp", "crown", "same-slope", "alpha-crown"])
def test_autocast_changes_nothing(method):
    expected = bounds_of(method)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = bounds_of(method)
        assert torch.is_autocast_enabled("cpu")
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16  # still on for the caller
    assert found.slope.dtype == torch.float32
    assert torch.equal(found.slope, expected.slope)
    assert torch.equal(found.lower, expected.lower)


def test_autocast_would_change_something(monkeypatch):
    """The test above can fail: without the guard the same call is off by a thousand times its rounding."""
    expected = bounds_of("ibp")
    monkeypatch.setattr("robboost.bounds.margins.full_precision", torch.no_grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = bounds_of("ibp")
    assert (found.lower.float() - expected.lower).abs().max() > 1e-4


def test_default_dtype_and_inference_mode_change_nothing():
    expected = {method: bounds_of(method) for method in ("crown", "alpha-crown")}
    torch.set_default_dtype(torch.float64)
    try:
        for method, bounds in expected.items():
            assert torch.equal(bounds_of(method).lower, bounds.lower)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        for method, bounds in expected.items():
            found = bounds_of(method)
            assert torch.equal(found.lower, bounds.lower)
            assert not found.lower.is_inference()


def test_switches_come_back_after_an_error_and_after_other_threads(monkeypatch):
    torch.set_float32_matmul_precision("high")
    before = state()
    with pytest.raises(RuntimeError, match="broken"), full_precision():
        raise RuntimeError("broken")
    assert state() == before
    inside, leave = threading.Event(), threading.Event()

    def other():
        with full_precision():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(20)
    bounds_of()  # ends while the other thread is still inside: the switches stay at full precision for it
    assert state() != before
    leave.set()
    thread.join()
    assert state() == before


@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "same-slope", "crown", "tightest"])
@pytest.mark.parametrize("name", NETWORKS)
def test_float32_agrees_with_float64_to_the_rounding_stated(name, method):
    """MarginBounds.precision: of the order of 1e-6 times the size of the sums."""
    model, shape = build(name)
    x = torch.rand(4, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).float()
    y, threat = torch.tensor([0, 1, 2, 0]), Threat(0.1, clip=(0.0, 1.0))
    exact = margin_bounds(model.float(), x, y, threat, method, precision="float64")
    found = margin_bounds(model.float(), x, y, threat, method)
    assert (found.lower.dtype, exact.lower.dtype) == (torch.float32, torch.float64)
    assert (found.precision, exact.precision) == ("float32", "float64")
    terms = exact.intercept.abs() + (exact.intercept - exact.lower).abs() + 1
    assert ((found.lower.double() - exact.lower).abs() <= 5e-6 * terms).all()


def test_windows_and_library_calls_of_any_size_agree(monkeypatch):
    """One bound by many small chunks and by one large one: the chunks are not part of the result."""
    model = architectures.build("conv 4 3x3/1, conv 4 4x4/2, fc 8", (1, 8, 8), seed=2).eval()
    x = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(6)
    whole = margin_bounds(model, x, y, Threat(0.1))
    monkeypatch.setattr("robboost.bounds.budget._ELEMENTS", {"cpu": 3000})
    parts = margin_bounds(model, x, y, Threat(0.1))
    assert torch.allclose(whole.lower, parts.lower, atol=1e-5)
    assert torch.allclose(whole.slope, parts.slope, atol=1e-5)
    monkeypatch.setattr(backward, "_DENSE_SHARE", 0.0)  # full maps everywhere
    dense = margin_bounds(model, x, y, Threat(0.1))
    assert torch.allclose(whole.lower, dense.lower, atol=1e-5)
