"""Loaders on damaged files: 2,750 inputs, and nothing but the library's own errors, in one line each.

A longer run: benchmarks/fuzz_loaders.py.
"""

import pytest
from fuzzing import mutants, seeds

from robboost.errors import RobBoostError

KINDS = [
    "m.safetensors", "e.safetensors", "w.safetensors", "m.pt", "l.pt", "m.onnx", "b.npz", "c.npz", "b.safetensors",
    "vnnlib", "manifest",
]  # fmt: skip
EACH = 250


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    found = seeds(folder)
    assert set(found) == set(KINDS)
    return folder, found


@pytest.mark.parametrize("kind", KINDS)
def test_only_typed_errors(kind, files):
    folder, found = files
    content, name, load = found[kind]
    file = folder / name
    load_fine = errors = longest = 0
    try:
        for mutant in mutants(content, EACH, seed=1):
            file.write_bytes(mutant)
            try:
                load(file)
                load_fine += 1
            except RobBoostError as error:
                errors += 1
                longest = max(longest, len(str(error).splitlines()))
    finally:
        file.write_bytes(content)
    assert longest == 1
    assert load_fine + errors == EACH
    assert errors > EACH // 5  # the damage reaches what the loaders look at
