"""A store filled on a GPU: the manifest of the CPU's, and its bounds to the float rounding of another order of sums."""

import copy
import json

import pytest
import torch
from small_stores import THREAT, examples, filled, pool, settings

from robboost.store import BoundStore, StoredColumns, fill_store, hash_member
from robboost.stored import stored_bounds

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; its CPU twin is"
                                                                                  " above")]),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_members_on_another_device_have_the_same_store(tmp_path, device, storage):
    cpu = filled(tmp_path / "cpu", storage=storage)
    members = [copy.deepcopy(member).to(device) for member in pool()]
    assert [hash_member(m) for m in members] == [hash_member(m) for m in pool()]
    other = fill_store(str(tmp_path / "s"), members, examples(), THREAT, settings=settings(storage=storage))
    assert other.identity == cpu.identity
    atol = 1e-6 if storage == "float32" else 1e-2
    assert torch.allclose(StoredColumns(other).load(), StoredColumns(cpu).load(), atol=atol)
    assert torch.allclose(other.intercepts(), cpu.intercepts(), atol=atol)
    found = stored_bounds(other, members, examples())
    mixes = torch.full((1, 3), 1 / 3, dtype=torch.float64)
    assert torch.allclose(found.lower(mixes), stored_bounds(cpu, pool(), examples()).lower(mixes), atol=3 * atol)


@pytest.mark.parametrize("device", DEVICES)
def test_the_command_takes_a_device(tmp_path, capsys, device):
    from test_commands import ASKED, POOL

    from robboost.cli import main

    asked = ["bounds", POOL, "--store", str(tmp_path / "s"), *ASKED, "--device", device, "--json"]
    with pytest.raises(SystemExit) as end:
        main(asked)
    assert end.value.code == 0
    used = json.loads(capsys.readouterr().out)["resources"]["peak_gpu_memory"]
    assert device == "cpu" or used > 0
    assert BoundStore.open(str(tmp_path / "s")).missing() == []
