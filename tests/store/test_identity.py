"""A bound is never reused for something else: every change of member, data, threat, method or storage is told apart."""

import copy

import pytest
import torch
from small_stores import THREAT, examples, fingerprint, pool, settings
from torch import nn

import robboost as rb
from robboost.errors import InputError, StoreError
from robboost.store import fill_store, hash_data, hash_member, settled_pairs


def test_every_other_question_is_refused_and_named(tmp_path):
    url = str(tmp_path / "s")
    x, y = examples()
    fill_store(url, pool(), (x, y), THREAT, settings=settings())
    clean = fingerprint(tmp_path / "s")
    other = pool()
    with torch.no_grad():
        other[2][1].weight[0, 0] += 1e-7
    brighter, relabelled = x.clone(), y.clone()
    brighter[3, 0, 0] += 1e-6
    relabelled[3] = (relabelled[3] + 1) % 4
    cases = [
        ("member 2 is", other, (x, y), THREAT, settings()),
        ("holds bounds of 3 members, asked for 2", pool()[:2], (x, y), THREAT, settings()),
        ("member 0 is", pool()[::-1], (x, y), THREAT, settings()),
        ("with data", pool(), (brighter, y), THREAT, settings()),
        ("with data", pool(), (x, relabelled), THREAT, settings()),
        ("with threat", pool(), (x, y), rb.Threat(0.06, clip=(0.0, 1.0)), settings()),
        ("with threat", pool(), (x, y), rb.Threat(0.05), settings()),
        ("with threat", pool(), (x, y), rb.Threat(0.05, "l2", clip=(0.0, 1.0)), settings()),
        ("with method crown, asked for ibp", pool(), (x, y), THREAT, settings(method="ibp")),
        ("with precision float32, asked for float64", pool(), (x, y), THREAT, settings(precision="float64")),
        ("with storage float32, asked for float16", pool(), (x, y), THREAT, settings(storage="float16")),
        ("with screening none, asked for settled", pool(), (x, y), THREAT, settings(screening=settled_pairs("linf"))),
    ]
    for message, members, data, threat, chosen in cases:
        with pytest.raises(StoreError, match=message):
            fill_store(url, members, data, threat, settings=chosen)
    assert fingerprint(tmp_path / "s") == clean
    # The same question with another budget is the same question: the layout on disk stands.
    fill_store(url, pool(), (x, y), THREAT, settings=settings(shard_bytes=5000, memory=2**22))
    assert fingerprint(tmp_path / "s") == clean


def test_other_versions_may_read_but_not_continue(tmp_path, monkeypatch):
    url = str(tmp_path / "s")
    fill_store(url, pool(), examples(), THREAT, settings=settings())
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    fill_store(url, pool(), examples(), THREAT, settings=settings())
    (tmp_path / "s" / "slopes" / "c" / "0" / "0" / "0").unlink()
    with pytest.raises(StoreError, match=r"begun with versions .* continued with .*9\.9\.9"):
        fill_store(url, pool(), examples(), THREAT, settings=settings())


class _Scaled(nn.Module):
    def __init__(self, factor: float, *, hidden: float = 1.0) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.factor = factor
        self._hidden = hidden
        self.choices = {"b", "a"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.factor if self.factor in {1.0, 2.0} else self.inner(x)


class _Shifted(_Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.factor


def test_hash_of_a_member_sees_weights_structure_attributes_and_code():
    def build(kind=_Scaled, **arguments):
        torch.manual_seed(0)
        return kind(**{"factor": 1.0, **arguments})

    base = hash_member(build())
    assert hash_member(build()) == base
    assert hash_member(copy.deepcopy(build())) == base
    assert hash_member(build(factor=2.0)) != base
    assert hash_member(build(hidden=2.0)) != base
    assert hash_member(build(kind=_Shifted)) != base
    half = build()
    half.inner.weight.data = half.inner.weight.data.to(torch.float64)
    assert hash_member(half) != base
    # Training mode is no part of what a member is.
    assert hash_member(build().eval()) == base

    def convolution(**changes):
        torch.manual_seed(0)
        return hash_member(nn.Sequential(nn.Conv2d(1, 2, 3, **changes)))

    assert (
        len(
            {
                convolution(),
                convolution(stride=2),
                convolution(padding=1),
                convolution(padding=1, padding_mode="circular"),
            }
        )
        == 4
    )
    assert hash_member(nn.Sequential(nn.ReLU())) != hash_member(nn.Sequential(nn.Tanh()))
    assert hash_member(nn.Sequential(nn.LeakyReLU(0.1))) != hash_member(nn.Sequential(nn.LeakyReLU(0.2)))


def test_hash_does_not_depend_on_the_process(tmp_path):
    """Python shuffles its sets anew in every process; the hash must not notice."""
    import subprocess
    import sys

    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import torch\nfrom test_identity import _Scaled\nfrom robboost.store import hash_member\n"
        "torch.manual_seed(0)\nprint(hash_member(_Scaled(1.0)))"
    )
    folders = [p for p in sys.path if p.endswith(("src", "tests", "store"))]
    torch.manual_seed(0)
    here = hash_member(_Scaled(1.0))
    run = subprocess.run(
        [sys.executable, "-c", code, *folders],
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": "1"},
        check=True,
    )
    assert run.stdout.strip() == here


def test_hash_of_data_sees_values_types_shapes_and_labels():
    x, y = torch.zeros(2, 3), torch.tensor([0, 1])
    hashes = [
        hash_data(x, y),
        hash_data(x.double(), y),
        hash_data(x.reshape(3, 2), y),
        hash_data(x, y.flip(0)),
        hash_data(-x, y),
    ]
    assert len(set(hashes)) == 5
    assert hash_data(x.clone(), y.to(torch.int32)) == hashes[0]
    assert hash_data(x.t().contiguous().t(), y) == hashes[0]


def test_refusals(tmp_path):
    x, y = examples()
    with pytest.raises(InputError, match="pool is empty"):
        fill_store(str(tmp_path / "s"), [], (x, y), THREAT)
    with pytest.raises(InputError, match="30 images and 29 labels"):
        fill_store(str(tmp_path / "s"), pool(), (x, y[:-1]), THREAT)
    with pytest.raises(InputError, match=r"members give \[3, 4\] logits"):
        fill_store(str(tmp_path / "s"), [pool()[0], pool(classes=3)[0]], (x, y), THREAT)
    with pytest.raises(InputError, match="store path is empty"):
        fill_store("", pool(), (x, y), THREAT)
