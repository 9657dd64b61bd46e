"""Machines of every kind: without compiled kernels, and with less memory than the slopes take."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import robboost as rb
from robboost.weights import SolverSettings


def _arrays(pairs=900, dim=300):
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(1, pairs, dim, generator=generator)
    slopes = (common + torch.randn(4, pairs, dim, generator=generator)) / dim
    return slopes, 1 + 0.4 * torch.randn(4, pairs, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("method", ["auto", "coordinate"])
def test_without_compiled_kernels_plain_torch_gives_the_same(monkeypatch, method):
    slopes, intercepts = _arrays()  # enough numbers for the kernels to be used
    settings = SolverSettings(epochs=2)
    kernels = ("kernel_cpu", "kernel_line", "kernel_gpu")
    compiled = rb.solve_weights(slopes, intercepts, 1.0, method=method, settings=settings)
    for name in ("numba", "triton"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in kernels:
        monkeypatch.delitem(sys.modules, f"robboost.weights.{name}", raising=False)
    plain = rb.solve_weights(slopes, intercepts, 1.0, method=method, settings=settings)
    assert not any(f"robboost.weights.{name}" in sys.modules for name in kernels)
    assert plain.status == compiled.status
    assert plain.objective == pytest.approx(compiled.objective, rel=1e-6)
    # At a kink, rounding decides which subgradient a pass without smoothing takes; each proves a bound of its own.
    assert plain.lower_bound == pytest.approx(compiled.lower_bound, rel=2e-6 if method == "auto" else 1e-3)


_LIMITED = """
import resource, sys
import numpy as np
import robboost as rb
rb.solve_weights(np.ones((2, 600, 500)), np.ones((2, 600)), 1.0)  # compiles and loads what it needs
slopes, intercepts = (np.load(path, mmap_mode="r") for path in sys.argv[1:3])
used = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
room = slopes.nbytes // 3
resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
found = rb.solve_weights(slopes, intercepts, 1.0)
print(found.status, found.objective)
try:
    np.ones(slopes.shape, dtype=slopes.dtype)
except MemoryError:
    print("refused")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory in the way of Linux")
def test_mapped_slopes_may_be_larger_than_memory(tmp_path):
    pairs, dim = 30_000, 800
    paths = [tmp_path / name for name in ("slopes.npy", "intercepts.npy")]
    # 192 MB with room for 64 MB: a copy of the slopes would not fit.
    slopes = np.lib.format.open_memmap(paths[0], mode="w+", dtype=np.float16, shape=(4, pairs, dim))
    rng = np.random.default_rng(0)
    few = ((rng.normal(size=(1, 1000, dim)) + rng.normal(size=(4, 1000, dim))) / dim).astype(np.float16)
    for start in range(0, pairs, 1000):
        slopes[:, start : start + 1000] = few
    slopes.flush()
    intercepts = 1 + 0.4 * rng.normal(size=(4, pairs))
    np.save(paths[1], intercepts)
    run = subprocess.run(
        [sys.executable, "-c", _LIMITED, *map(str, paths)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    status, objective = first.split()
    assert (status, second) == ("optimal", "refused")
    assert float(objective) == pytest.approx(rb.solve_weights(slopes, intercepts, 1.0).objective, rel=2e-6)
