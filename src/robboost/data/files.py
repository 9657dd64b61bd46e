"""Where official files are found: the data directory, or a download; every known file is checked by SHA-256."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import zlib
from pathlib import Path

from robboost.errors import DataError

__all__ = ["data_directory", "official_file"]

# folder/file -> SHA-256 of the unpacked official file ("" where only the packed one's is published).
_UNPACKED = {
    "mnist/train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "mnist/train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "mnist/t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "mnist/t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "fashion-mnist/train-images-idx3-ubyte": "",
    "fashion-mnist/train-labels-idx1-ubyte": "",
    "fashion-mnist/t10k-images-idx3-ubyte": "",
    "fashion-mnist/t10k-labels-idx1-ubyte": "",
    "cifar-10-batches-bin/data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "cifar-10-batches-bin/data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "cifar-10-batches-bin/data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "cifar-10-batches-bin/data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "cifar-10-batches-bin/data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "cifar-10-batches-bin/test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
# Packed official file -> SHA-256.
_PACKED = {
    "mnist/train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "mnist/train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "mnist/t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "mnist/t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    "fashion-mnist/train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "fashion-mnist/train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "fashion-mnist/t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "fashion-mnist/t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    "cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
}
_SOURCE = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "cifar-10-binary.tar.gz": "https://www.cs.toronto.edu/~kriz/",
}
# The largest official file unpacks to 47 MB; nothing larger is unpacked into memory.
_MAX_UNPACKED = 64 * 2**20


def data_directory(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the official files: the argument, else ROBBOOST_DATA, else a folder in the user's cache."""
    if folder is not None:
        return Path(folder)
    if setting := os.environ.get("ROBBOOST_DATA"):
        return Path(setting)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "robboost"


def official_file(name: str, *, folder: Path, download: bool = True) -> bytes:
    """The unpacked content of an official file ("mnist/train-images-idx3-ubyte"), checked.

    Looked for in this order: unpacked in `folder`, packed beside it, downloaded into `folder`.
    """
    plain, packed = folder / name, folder / f"{name}.gz"
    if plain.exists():
        return _checked(_read(plain), name, plain)
    if packed.exists():
        return _unpacked(packed, name)
    if not download:
        raise DataError(
            f"{plain}: not found; put the official file there, or set ROBBOOST_DATA to the folder that has it"
        )
    if name.startswith("cifar"):
        archive = _download("cifar-10-binary.tar.gz", folder, wanted=plain)
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        return _checked(_read(plain), name, plain)
    return _unpacked(_download(f"{name}.gz", folder, wanted=plain), name)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); expected the official file") from None


def _checked(raw: bytes, name: str, path: Path) -> bytes:
    expected = _UNPACKED[name]
    if expected and hashlib.sha256(raw).hexdigest() != expected:
        raise DataError(f"{path}: its SHA-256 is not that of the official file; delete it and fetch it again")
    return raw


def _unpacked(path: Path, name: str) -> bytes:
    """The content of a .gz: known by its own hash, or by that of what is in it (it may have been packed anew)."""
    raw = _read(path)
    official = hashlib.sha256(raw).hexdigest() == _PACKED.get(f"{name}.gz")
    try:
        unpacker = zlib.decompressobj(wbits=31)
        content = unpacker.decompress(raw, _MAX_UNPACKED)
        complete = unpacker.eof
    except (zlib.error, gzip.BadGzipFile):
        complete = False
    if not complete:
        raise DataError(f"{path}: not a complete gzip file of the expected size; delete it and fetch it again")
    if official:
        return content
    if not _UNPACKED[name]:
        raise DataError(f"{path}: its SHA-256 is not that of the official file; delete it and fetch it again")
    return _checked(content, name, path)


def _download(name: str, folder: Path, *, wanted: Path) -> Path:
    import pooch  # only here: loading from a data directory needs no downloader

    url = _SOURCE[name.split("/")[0]] + name.split("/")[-1]
    target = folder / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        pooch.retrieve(url, known_hash=f"sha256:{_PACKED[name]}", fname=target.name, path=target.parent)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError is a wrong hash
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{wanted}: not found and not downloaded ({reason}); put the official file there,"
            " or set ROBBOOST_DATA to its folder"
        ) from None
    return target
