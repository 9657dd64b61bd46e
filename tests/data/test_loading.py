"""Embedded data, official formats, checks of every file, bad input."""

import gzip
import os
import struct

import numpy as np
import pytest
import torch

import robboost as rb
from robboost.data import files
from robboost.data.formats import parse_cifar10, parse_idx, parse_npz
from robboost.data.loading import _positions, embedded_positions
from robboost.errors import DataError, InputError

full_data = pytest.mark.full_data
needs_data = pytest.mark.skipif("ROBBOOST_DATA" not in os.environ, reason="needs the official files in ROBBOOST_DATA")


def idx_bytes(array: np.ndarray) -> bytes:
    return b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def tiny_mnist(tmp_path, monkeypatch):
    """A data directory with a 'MNIST' of 10,000 one-pixel training images, its hashes known to the loader."""
    import hashlib

    folder = tmp_path / "mnist"
    folder.mkdir()
    for part, count in (("train", 10_000), ("t10k", 20)):
        images = (np.arange(count) % 251).astype(np.uint8).reshape(count, 1, 1)
        for kind, array in (("images-idx3", images), ("labels-idx1", images.reshape(-1) % 10)):
            raw = idx_bytes(array.astype(np.uint8))
            (folder / f"{part}-{kind}-ubyte").write_bytes(raw)
            monkeypatch.setitem(files._UNPACKED, f"mnist/{part}-{kind}-ubyte", hashlib.sha256(raw).hexdigest())
    return tmp_path


def test_embedded_subset():
    sizes = {split: len(rb.load_dataset("mnist-small", split=split)) for split in ("train", "heldout", "test")}
    assert sizes == {"train": 4000, "heldout": 1000, "test": 1000}
    data = rb.load_dataset("mnist-small")
    assert data.name == "mnist-small"  # labelled as a subset wherever it is shown
    assert data.images.shape == (1000, 1, 28, 28)
    assert data.images.max() == 1
    assert data.labels.bincount().min() > 70
    assert data.input_shape == (1, 28, 28)


def test_embedded_file_is_small():
    from importlib.resources import files as resources

    assert len(resources("robboost.data").joinpath("mnist_small.xz").read_bytes()) < 1e6


def test_splits_are_disjoint_and_complete():
    train, held = _positions(60_000, "train"), _positions(60_000, "heldout")
    assert len(held) == 5_000
    assert np.array_equal(np.sort(np.concatenate([train, held])), np.arange(60_000))
    assert len(_positions(50_000, "heldout")) == 5_000
    # the subset's heldout images are heldout in the full set too: a pool trained on full MNIST has not seen them
    assert set(embedded_positions("heldout")) <= set(held)
    assert set(embedded_positions("train")) <= set(train)
    assert len(set(embedded_positions("train"))) == 4_000


def test_official_files_from_a_directory(tiny_mnist):
    held = rb.load_dataset("mnist", split="heldout", data_dir=tiny_mnist)
    train = rb.load_dataset("mnist", split="train", data_dir=tiny_mnist)
    assert (len(held), len(train)) == (5_000, 5_000)
    assert held.indices[:2].tolist() == [1, 3]
    assert held.images[0].item() == pytest.approx(1 / 255)
    assert held.labels[4].item() == 9
    assert len(rb.load_dataset("mnist", data_dir=tiny_mnist)) == 20


def test_environment_variable_names_the_directory(tiny_mnist, monkeypatch):
    monkeypatch.setenv("ROBBOOST_DATA", str(tiny_mnist))
    assert len(rb.load_dataset("mnist")) == 20
    monkeypatch.delenv("ROBBOOST_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny_mnist / "cache"))
    assert files.data_directory() == tiny_mnist / "cache" / "robboost"


def test_packed_files_are_found_and_checked(tiny_mnist):
    plain = tiny_mnist / "mnist" / "t10k-images-idx3-ubyte"
    packed = plain.with_name(plain.name + ".gz")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert len(rb.load_dataset("mnist", data_dir=tiny_mnist)) == 20
    packed.write_bytes(packed.read_bytes()[:-30])
    with pytest.raises(DataError, match="not a complete gzip file"):
        rb.load_dataset("mnist", data_dir=tiny_mnist)


def test_a_flipped_bit_is_found(tiny_mnist):
    path = tiny_mnist / "mnist" / "t10k-images-idx3-ubyte"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match="SHA-256 is not that of the official file"):
        rb.load_dataset("mnist", data_dir=tiny_mnist)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte: not found.*ROBBOOST_DATA"):
        rb.load_dataset("mnist", data_dir=tmp_path, download=False)


def test_a_failed_download_is_one_line(tmp_path, monkeypatch):
    pooch = pytest.importorskip("pooch")

    def refuse(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(pooch, "retrieve", refuse)
    with pytest.raises(DataError, match="not downloaded") as error:
        rb.load_dataset("cifar10", data_dir=tmp_path)
    assert "\n" not in str(error.value)


def test_npz(tmp_path):
    path = tmp_path / "mine.npz"
    images = np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)
    np.savez(path, images=images, labels=np.array([0, 1, 2, 2, 1, 0]))
    data = rb.load_dataset(path, split="all")
    assert data.name == "mine"
    assert data.images.shape == (6, 1, 5, 4)
    torch.testing.assert_close(data.images[:, 0], torch.from_numpy(images) / 255)
    assert data.classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((2, 3, 3), np.uint8)}, "no array 'labels'"),
        ({"images": np.zeros((2, 3), np.uint8), "labels": np.zeros(2, int)}, "images are"),
        ({"images": np.zeros((2, 3, 3), np.int64), "labels": np.zeros(2, int)}, "images are"),
        ({"images": np.zeros((2, 3, 3), np.uint8), "labels": np.zeros(3, int)}, "labels are"),
        ({"images": np.zeros((2, 3, 3), np.uint8), "labels": np.zeros(2)}, "labels are"),
        ({"images": np.full((2, 3, 3), 2.0), "labels": np.zeros(2, int)}, r"within \[0, 1\]"),
        ({"images": np.full((2, 3, 3), np.nan), "labels": np.zeros(2, int)}, r"within \[0, 1\]"),
        ({"images": np.zeros((2, 3, 3)), "labels": np.array([0, -1])}, "labels reach from"),
        ({"images": np.zeros((0, 3, 3)), "labels": np.zeros(0, int)}, "no images"),
        ({"images": np.array([None, "x"], dtype=object), "labels": np.zeros(2, int)}, "without pickled objects"),
    ],
)
def test_bad_npz(tmp_path, arrays, message):
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=message):
        rb.load_dataset(path)


def test_unreadable_npz(tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(DataError, match="not a readable"):
        rb.load_dataset(tmp_path / "text.npz")
    with pytest.raises(DataError, match="cannot be read"):
        rb.load_dataset(tmp_path / "absent.npz")


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    from robboost.data import formats

    monkeypatch.setattr(formats, "MAX_NPZ_BYTES", 1000)
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, images=np.zeros((10, 28, 28), np.uint8), labels=np.zeros(10, int))
    with pytest.raises(DataError, match="expected at most 1000"):
        rb.load_dataset(path)


@pytest.mark.parametrize("name", ["imagenet", "", "mnist "])
def test_unknown_data_set(name):
    with pytest.raises(InputError, match="expected one of mnist-small"):
        rb.load_dataset(name)


def test_unknown_split():
    with pytest.raises(InputError, match="split='validation'"):
        rb.load_dataset("mnist-small", split="validation")


def test_idx_by_hand_and_damaged():
    array = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    raw = idx_bytes(array)
    assert np.array_equal(parse_idx(raw, name="a"), array)
    for damaged in (
        raw[:-1],
        raw + b"x",
        raw[:7],
        b"",
        b"\x00\x00\x09\x01",
        idx_bytes(array).replace(b"\x03", b"\xff"),
    ):
        with pytest.raises(DataError):
            parse_idx(damaged, name="a")


def test_cifar_by_hand_and_damaged():
    record = bytes([7]) + bytes([1] * 1024) + bytes([2] * 1024) + bytes([3] * 1024)
    images, labels = parse_cifar10(record * 2, name="c")
    assert labels.tolist() == [7, 7]
    assert images[1, :, 31, 0].tolist() == [1, 2, 3]
    for damaged in (record[:-1], b""):
        with pytest.raises(DataError, match="3073-byte records"):
            parse_cifar10(damaged, name="c")


@pytest.mark.parametrize("parse", [parse_idx, parse_cifar10, parse_npz])
def test_random_bytes_give_typed_errors_only(parse):
    random = np.random.default_rng(0)
    for _ in range(300):
        raw = random.bytes(int(random.integers(0, 200)))
        if random.random() < 0.5:
            raw = b"\x00\x00\x08" + raw
        try:
            parse(raw, name="fuzz")
        except DataError:
            continue


def test_take_and_hash():
    data = rb.load_dataset("mnist-small")
    part = data.take(10)
    assert len(part) == 10
    assert torch.equal(data.take(data.labels == 3).labels.unique(), torch.tensor([3]))
    assert data.take([5, 2]).indices.tolist() == data.indices[[5, 2]].tolist()
    assert part.sha256() == data.take(slice(0, 10)).sha256() != data.sha256()
    with pytest.raises(InputError, match="take"):
        data.take(1001)


@full_data
@needs_data
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_full_data(name):
    sizes = [len(rb.load_dataset(name, split=split, download=False)) for split in ("train", "heldout", "test")]
    assert sizes == ([55_000] if name == "mnist" else [45_000]) + [5_000, 10_000]


@full_data
@needs_data
def test_embedded_images_are_those_of_the_full_set():
    for split in ("train", "heldout", "test"):
        small, full = (rb.load_dataset(name, split=split) for name in ("mnist-small", "mnist"))
        where = torch.searchsorted(full.indices, small.indices)
        assert torch.equal(full.images[where], small.images)
        assert torch.equal(full.labels[where], small.labels)
