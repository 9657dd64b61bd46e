"""A problem ten times larger than the memory that the kernel lets the process have: solved, with proof."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_stores import synthetic_store

from robboost.store import StoredColumns
from robboost.weights import objective, weight_problem

# The limit counts every private page that the process may write to, whether it was touched or not; the page cache does
# not count. Imports, the compiled kernel and the stacks of threads are there before it is set.
LIMITED = """
import json, resource, sys
import threading, torch
from robboost.store import BoundStore, StoredColumns
from robboost.weights import solve, streamed_problem

def writable():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return 1024 * int(lines["VmData"].split()[0])

def solved(url):
    stream = StoredColumns(BoundStore.open(url), slab_bytes=2**20, ahead=1)
    return stream, solve(streamed_problem(stream, stream.intercepts()))

torch.set_num_threads(1)
threading.stack_size(2**18)
solved(sys.argv[1])
stream = StoredColumns(BoundStore.open(sys.argv[2]), slab_bytes=2**20, ahead=1)
before = writable()
allowed = before + stream.nbytes // 10
resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
try:
    stream.load()
    refused = ""
except (MemoryError, RuntimeError) as error:
    refused = str(error)
_, solution = solved(sys.argv[2])
print(json.dumps({"refused": refused, "grown": writable() - before, "weights": solution.weights,
                  "objective": solution.objective, "gap": solution.gap}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_ten_times_the_memory(tmp_path):
    synthetic_store(str(tmp_path / "small"), 4, 270, 3072, shard_bytes=2**20)
    large = synthetic_store(str(tmp_path / "large"), 4, 5400, 3072, shard_bytes=2**20)
    source = Path(__file__).parents[2] / "src"
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "small"), str(tmp_path / "large")],
        env={**os.environ, "PYTHONPATH": str(source), "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    stream = StoredColumns(large)
    assert "allocate" in found["refused"]
    assert found["grown"] <= stream.nbytes // 10
    whole = weight_problem(stream.load(), large.intercepts(), 1.0)
    assert found["gap"] <= 1e-6
    assert found["objective"] == pytest.approx(objective(whole, found["weights"]), rel=1e-12)
