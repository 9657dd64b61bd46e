"""A user's session by subprocess, from an empty folder; and one line with exit code 2 for everything wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import robboost

SOURCE = str(Path(robboost.__file__).parents[1])
POOL = str(Path(robboost.__file__).parent / "data" / "demo_pool")
FAST = ["--bounds", "ibp+crown-ibp", "--limit", "40"]


def run(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "ROBBOOST_DATA": str(folder / "none")}
    command = [sys.executable, "-m", "robboost", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """fit, then certify and attack the saved ensemble."""
    folder = tmp_path_factory.mktemp("session")
    data = ["--data", "mnist-small"]
    return folder, {
        "fit": run(folder, "fit", POOL, *data, *FAST, "--out", "mix.safetensors", "--json"),
        "certify": run(folder, "certify", "mix.safetensors", *data, *FAST, "--json"),
        "attack": run(folder, "attack", "mix.safetensors", *data, "--limit", 40, "--steps", 10, "--json"),
    }


def test_fit_certify_attack(session):
    folder, results = session
    for name, result in results.items():
        assert result.returncode == 0, (name, result.stderr)
    values = {name: json.loads(result.stdout) for name, result in results.items()}
    assert (folder / "mix.safetensors").exists()
    assert sum(values["fit"]["weights"]) == pytest.approx(1)
    assert values["fit"]["solution"]["gap"] <= 1e-5
    verified = values["certify"]["verified_error"]["value"]
    attacked = values["attack"]["attack_error"]["value"]
    clean = values["certify"]["clean_error"]["value"]
    assert verified >= attacked >= clean == values["attack"]["clean_error"]["value"]
    assert values["certify"]["threat"] == "linf 0.1 within [0, 1]"  # read from the ensemble's file


def test_results_are_text_without_json(session):
    folder, _ = session
    result = run(folder, "certify", "mix.safetensors", *FAST)
    assert result.returncode == 0, result.stderr
    assert "verified error" in result.stdout
    assert "Traceback" not in result.stderr
