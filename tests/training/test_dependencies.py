"""`python -m robboost.training` needs torch, numpy and safetensors alone: a GPU machine may have nothing else."""

import subprocess
import sys
from pathlib import Path

from robboost.models import read_pool

BLOCKED = """
import sys
missing = {"typer", "rich", "click", "pooch", "numba", "matplotlib", "zarr", "scipy", "PIL", "onnx", "onnxruntime"}
class Installed:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in missing else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Installed(finder) for finder in sys.meta_path]
from robboost.training.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
POOL = """
dataset = "mnist-small"
[defaults]
architecture = "conv 4 4x4/4, fc 16"
eps = 0.02
batch = 50
[[members]]
method = "ibp"
[[members]]
method = "mtl-ibp"
mixture = 0.5
"""


def test_training_runs_where_nothing_else_is_installed(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(POOL)
    arguments = [str(tmp_path / "tiny.toml"), "--limit", "200", "--epochs", "2", "--device", "cpu"]
    command = [sys.executable, "-c", BLOCKED, *arguments, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "held-out error" in done.stdout
    pool = read_pool(tmp_path / "out/tiny")
    assert pool.names == ("net-ibp-0", "net-mtl-ibp-0")
    refused = subprocess.run(
        [sys.executable, "-c", BLOCKED, "none", "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
