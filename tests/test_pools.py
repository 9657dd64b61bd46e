"""Pools of networks in folders and lists: round trip, hashes, duplicates, mixed shapes, and naming what is broken."""

import json

import pytest
import torch

from robboost.errors import CheckpointError, InputError
from robboost.models import PoolMember, read_pool, save_model, write_pool
from robboost.models.architectures import build

TINY = (1, 8, 8)


def members(count=3):
    text = "conv 2 4x4/2, fc 5"
    return [
        PoolMember(f"m{t}", build(text, TINY, seed=t), TINY, text, {"eps": 0.1}, t, {"verified_error": 0.05 + t})
        for t in range(count)
    ]


def images():
    return torch.rand(4, *TINY, generator=torch.Generator().manual_seed(0))


def test_round_trip(tmp_path):
    given = members()
    written = write_pool(tmp_path / "pool", given, {"dataset": "mnist"})
    found = read_pool(tmp_path / "pool")
    assert found.names == written.names == ("m0", "m1", "m2")
    assert found.notes == {"dataset": "mnist"}
    assert found.input_shape == TINY
    assert len(found) == 3
    for member, original in zip(found.members, given, strict=True):
        assert torch.equal(member.model(images()), original.model(images()))
        assert (member.architecture, member.config, member.seed) == ("conv 2 4x4/2, fc 5", {"eps": 0.1}, original.seed)
        assert member.metrics == original.metrics
    assert [member.sha256 for member in found.members] == [member.sha256 for member in written.members]
    assert "Sequential" not in repr(found.members[0])


def test_folder_without_a_manifest_and_list_of_files(tmp_path):
    write_pool(tmp_path, members())
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "readme.txt").write_text("not a model")
    folder = read_pool(tmp_path)
    assert folder.names == ("m0", "m1", "m2")
    assert folder.members[2].seed == 2  # from the file's own notes
    assert read_pool([tmp_path / "m2.safetensors", str(tmp_path / "m0.safetensors")]).names == ("m2", "m0")
    assert read_pool(tmp_path / "m1.safetensors").names == ("m1",)


def test_list_of_folders_and_files(tmp_path):
    write_pool(tmp_path / "a", members(2))
    write_pool(tmp_path / "b", members(3)[2:])
    assert read_pool([tmp_path / "b", tmp_path / "a" / "m1.safetensors"]).names == ("m2", "m1")
    assert read_pool([tmp_path / "a", tmp_path / "b"]).names == ("m0", "m1", "m2")


def test_list_of_members_in_one_checkpoint(tmp_path):
    torch.save({"state_dict": [member.model.state_dict() for member in members()]}, tmp_path / "all.pth")
    found = read_pool(tmp_path, architecture="conv 2 4x4/2, fc 5", input_shape=TINY)
    assert found.names == ("all-0", "all-1", "all-2")


def test_half_precision(tmp_path):
    write_pool(tmp_path, members(1), dtype=torch.float16)
    stored = read_pool(tmp_path).models[0][0].weight
    assert torch.equal(stored, members(1)[0].model[0].weight.half().float())


def test_changed_file_is_named_before_any_is_loaded(tmp_path):
    write_pool(tmp_path, members())
    content = bytearray((tmp_path / "m2.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "m2.safetensors").write_bytes(content)
    (tmp_path / "m0.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"m2\.safetensors: SHA-256 is [0-9a-f]{64}, the manifest says"):
        read_pool(tmp_path)


def test_missing_file_is_named_before_a_damaged_one_is_read(tmp_path):
    write_pool(tmp_path, members())
    (tmp_path / "m0.safetensors").write_bytes(b"damaged")
    (tmp_path / "m2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"m2\.safetensors: missing"):
        read_pool(tmp_path)


def test_duplicates_in_any_format(tmp_path):
    member = members(1)[0]
    save_model(member.model, tmp_path / "a.safetensors", input_shape=TINY)
    torch.save(member.model.state_dict(), tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match=r"b\.pt: the same network as .*a\.safetensors"):
        read_pool(tmp_path, architecture="conv 2 4x4/2, fc 5", input_shape=TINY)
    with pytest.raises(CheckpointError, match="the same network"):
        read_pool([tmp_path / "a.safetensors", tmp_path / "a.safetensors"])


def test_equal_names_and_mixed_shapes(tmp_path):
    for n, shape in enumerate((TINY, TINY, (1, 9, 9))):
        (tmp_path / str(n)).mkdir()
        save_model(build("fc 4", shape, seed=n), tmp_path / str(n) / "m.safetensors", input_shape=shape)
    with pytest.raises(CheckpointError, match=r"1/m\.safetensors: a second member named 'm'"):
        read_pool([tmp_path / "0/m.safetensors", tmp_path / "1/m.safetensors"])
    (tmp_path / "2/m.safetensors").rename(tmp_path / "2/other.safetensors")
    with pytest.raises(CheckpointError, match=r"other\.safetensors: takes images of shape \(1, 9, 9\)"):
        read_pool([tmp_path / "0/m.safetensors", tmp_path / "2/other.safetensors"])


def test_different_numbers_of_classes(tmp_path):
    for n in (3, 4):
        save_model(build("fc 4", TINY, num_classes=n), tmp_path / f"{n}.safetensors", input_shape=TINY)
    with pytest.raises(CheckpointError, match=r"4\.safetensors: 4 classes, .*3\.safetensors 3"):
        read_pool(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, 'expected a table with "format": 1'),
        ({"members": {}}, 'a list of "members"'),
        ({"members": [3]}, 'a list of "members"'),
        ({"members": []}, "0 models, expected 1 to"),
        ({"members": [{"name": "a"}]}, "member 'a' has no file or sha256"),
        ({"members": [{"file": "../m0.safetensors", "sha256": ""}]}, "leaves the folder"),
        ({"members": [{"file": "/etc/passwd", "sha256": ""}]}, "leaves the folder"),
        ({"members": [{"file": "a\0b", "sha256": ""}]}, "leaves the folder"),
    ],
)
def test_damaged_manifest(change, message, tmp_path):
    write_pool(tmp_path, members(1))
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        read_pool(tmp_path)


def test_manifest_that_is_no_json(tmp_path):
    (tmp_path / "manifest.json").write_text("[[" * 100_000)
    with pytest.raises(CheckpointError, match="no valid JSON"):
        read_pool(tmp_path)


def test_nothing_there(tmp_path):
    for source, message in ((tmp_path, "0 models"), (tmp_path / "no", "missing"), ([], "list of 0 files: 0 models")):
        with pytest.raises(CheckpointError, match=message):
            read_pool(source)


def test_what_cannot_be_written(tmp_path):
    first = members(1)[0]
    nameless = PoolMember("../a", first.model, TINY)
    for bad in ([], [first, first], [nameless]):
        with pytest.raises(InputError, match="expected at least one, all different"):
            write_pool(tmp_path, bad)
    with pytest.raises(InputError, match="no input_shape"):
        write_pool(tmp_path, [PoolMember("a", first.model)])
    with pytest.raises(InputError, match="notes cannot be written"):
        write_pool(tmp_path, [first], {"a": {1, 2}})
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be created"):
        write_pool(tmp_path / "file", [first])
    with pytest.raises(CheckpointError, match="the same network as"):
        write_pool(tmp_path, [first, PoolMember("copy", first.model, TINY)])
