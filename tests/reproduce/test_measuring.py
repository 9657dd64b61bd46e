"""A measured pool against `certify`, `compare` and `attack` on the same images; parts that are taken up again."""

import copy
from dataclasses import replace

import pytest
import torch
from small_pools import SHAPE, examples, pool
from small_runs import quick, trained_run

import robboost.reproduce.measure as measuring
from robboost.attacks import AttackSettings
from robboost.certification import certify
from robboost.comparison import Settings, compare
from robboost.data import Dataset
from robboost.errors import InputError
from robboost.models import Ensemble, Pool, PoolMember, read_pool
from robboost.reproduce.measure import Images, Protocol, measure, suited_bounds
from robboost.reproduce.parts import Parts, identity
from robboost.reproduce.request import measured
from robboost.reproduce.summaries import unpacked
from robboost.threat import Threat

THREAT = Threat(0.15, clip=(0.0, 1.0))  # between certifying all images and none
PROTOCOL = Protocol("ibp+crown", AttackSettings(steps=5, restarts=1), "cpu")


def dataset(split, count, seed):
    x, y = examples(count, seed)
    return Dataset("stripes", split, x, y, torch.arange(count), ("left", "middle", "right"))


@pytest.fixture(scope="module")
def members():
    """Their logits are unlike in size, so that a forgotten scale shows."""
    models = pool()
    for model, factor in zip(models, (1, 30, 0.2), strict=True):
        for parameter in model[-1].parameters():
            parameter.data *= factor
    return Pool(tuple(PoolMember(f"m{n}", model, SHAPE) for n, model in enumerate(models)))


@pytest.fixture(scope="module")
def images():
    return Images(dataset("heldout", 45, 1), dataset("test", 60, 2), dataset("train", 30, 3))


@pytest.fixture(scope="module")
def figures(members, images):
    return measure(members, images, THREAT, protocol=PROTOCOL, parts=Parts(None))


def test_every_row_is_what_certify_says(figures, members, images):
    weights = torch.tensor(figures["weights"], dtype=torch.float64)
    mixes = {
        **{name: Ensemble([model], [1.0]) for name, model in zip(members.names, members.models, strict=True)},
        "uniform": Ensemble(members.models, [1 / 3] * 3, figures["scales"]),
        "RobBoost": Ensemble(members.models, weights, figures["scales"]),
    }
    for split, data in (("verified_test", images.test), ("verified_train", images.train)):
        for name, ensemble in mixes.items():
            certificate = certify(ensemble, data.images, data.labels, THREAT, method="ibp+crown")
            assert figures["rows"][name][split]["count"] == int((~certificate.certified).sum())
            if split == "verified_test":
                assert figures["rows"][name]["clean"]["count"] == int((~certificate.correct).sum())
                if name in figures["certified"]:
                    assert torch.equal(unpacked(figures["certified"][name], 60), certificate.certified)


def test_the_same_figures_as_compare(figures, members, images):
    """An independent way through fitting, proving, attacking and testing."""
    settings = Settings(bounds="ibp+crown", attack=PROTOCOL.attack, cascade=False)
    held, test = ((data.images, data.labels) for data in (images.fit, images.test))
    table = compare(members, fit=held, test=test, threat=THREAT, settings=settings).to_dict()
    rows = {row["name"]: row for row in table["rows"]}
    for name in ("uniform", "RobBoost"):
        mine, theirs = figures["rows"][name], rows[name]
        assert mine["verified_test"] == theirs["verified_error"]
        assert mine["verified_fit"] == theirs["verified_error_fit"]
        assert mine["clean"] == theirs["clean_error"]
        assert mine["attack"] == theirs["attack_error"]
        assert mine["targeted_test"] == pytest.approx(theirs["targeted_verified_error"])
        assert mine["megabytes"] == pytest.approx(theirs["size_mb"])
    assert figures["tests"] == table["tests"]
    assert f"best single ({figures['best_single']})" in rows
    assert figures["some_member"] == rows["some member certifies"]["verified_error"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; its CPU twin is above")
def test_the_same_verdicts_on_a_gpu(figures, members, images):
    """From the networks as they are; the mix may differ by rounding, the members and the average may not."""
    copies = Pool(tuple(replace(member, model=copy.deepcopy(member.model)) for member in members.members))
    protocol = replace(PROTOCOL, device="cuda")
    found = measure(copies, images, THREAT, protocol=protocol, parts=Parts(None))
    for name in ("m0", "m1", "m2", "uniform"):
        for key in ("verified_test", "verified_train", "verified_fit", "clean"):
            assert found["rows"][name][key] == figures["rows"][name][key]
    assert found["weights"] == pytest.approx(figures["weights"], abs=1e-3)


def test_clean_attacked_verified(figures):
    for name in ("uniform", "RobBoost", figures["best_single"]):
        row = figures["rows"][name]
        assert row["clean"]["count"] <= row["attack"]["count"] <= row["verified_test"]["count"]
    others = [name for name in figures["names"] if name != figures["best_single"]]
    assert all(figures["rows"][name]["attack"] is None for name in others)
    pairs = figures["eliminated"]["train"]
    assert (pairs["pairs"], pairs["examples"]) == (60, 30)


def test_interrupted_and_again(members, images, tmp_path, monkeypatch, figures):
    monkeypatch.setitem(measuring._PART, "cpu", 25)
    calls = []
    real = measuring.prove

    def counted(*arguments, **options):
        calls.append(len(arguments[1]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(measuring, "prove", counted)
    with pytest.raises(KeyboardInterrupt):
        measure(members, images, THREAT, protocol=PROTOCOL, parts=Parts(tmp_path))
    again = measure(members, images, THREAT, protocol=PROTOCOL, parts=Parts(tmp_path))
    assert calls == [25, 25, 10, 10, 25, 5]  # the two finished parts of the test set were not proved again
    assert again["rows"] == figures["rows"]
    measure(members, images, THREAT, protocol=PROTOCOL, parts=Parts(tmp_path))
    assert len(calls) == 6
    # Another radius is other work.
    measure(
        members, images, Threat(0.04, clip=(0.0, 1.0)), protocol=Protocol("ibp", None, "cpu"), parts=Parts(tmp_path)
    )
    assert len(calls) > 6


def test_a_damaged_part_is_computed_again(tmp_path):
    parts = Parts(tmp_path / "new")
    made = parts.arrays("a", lambda: {"x": torch.arange(3)})
    file = tmp_path / "new" / "a.npz"
    file.write_bytes(file.read_bytes()[:20])
    assert torch.equal(parts.arrays("a", lambda: {"x": torch.arange(4)})["x"], torch.arange(4))
    assert torch.equal(made["x"], torch.arange(3))
    assert torch.equal(parts.arrays("a", lambda: pytest.fail("computed again"))["x"], torch.arange(4))
    assert identity(a=1) != identity(a=2)


def test_bounds_on_disk_choose_much_the_same_mix(members, images, tmp_path, monkeypatch, figures):
    pytest.importorskip("zarr")
    monkeypatch.setattr(measuring, "_STORE_FROM", 10)
    stored = measure(members, images, THREAT, protocol=PROTOCOL, parts=Parts(tmp_path))
    for name in ("m0", "m1", "m2", "uniform"):
        assert stored["rows"][name] == figures["rows"][name]
    ours = (stored["rows"]["RobBoost"]["verified_fit"]["count"], figures["rows"]["RobBoost"]["verified_fit"]["count"])
    assert abs(ours[0] - ours[1]) <= 1
    assert not list(tmp_path.rglob("fit-bounds"))


def test_no_training_images_and_no_attack(members, images):
    found = measure(
        members, Images(images.fit, images.test), THREAT, protocol=Protocol("ibp", None, "cpu"), parts=Parts(None)
    )
    assert found["rows"]["RobBoost"]["verified_train"] is None
    assert found["rows"]["RobBoost"]["attack"] is None
    assert set(found["eliminated"]) == {"test"}


def test_bounds_that_suit_the_training(members):
    assert suited_bounds(members) == "tightest"
    ibp = Pool(tuple(PoolMember(f"m{n}", m, SHAPE, config={"method": "ibp"}) for n, m in enumerate(members.models)))
    assert suited_bounds(ibp) == "ibp+crown-ibp"


def test_a_member_with_the_name_of_a_mix(members, images):
    bad = Pool(tuple(PoolMember(name, m, SHAPE) for name, m in zip(("a", "b", "uniform"), members.models, strict=True)))
    with pytest.raises(InputError, match="a member is named 'uniform': expected another name"):
        measure(bad, images, THREAT, protocol=PROTOCOL, parts=Parts(None))


def test_the_request_chooses_the_images(tmp_path):
    run = read_pool(trained_run(tmp_path))
    found = measured(run, quick(tmp_path, limit=12, train_images=7), None)
    assert (found["fit"]["images"], found["test"]["images"], found["train"]["images"]) == (12, 12, 7)
    assert found["eps"] == 0.05
    faithful = measured(run, quick(tmp_path, fit_split="train", train_images=20, eps="1/50"), None)
    assert faithful["fit"] == faithful["train"]
    assert faithful["eps"] == 0.02
    assert measured(run, quick(tmp_path, train_images=0, steps=0), None)["train"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": 0}, "--limit 0: expected at least 1"),
        ({"train_images": -1}, "--train-images -1: expected 0 or more"),
        ({"train_images": 0, "fit_split": "train"}, "--train-images 0 with --fit-split train"),
        ({"fit_split": "all", "data": "mnist-small"}, "split='all': expected one of"),
    ],
)
def test_impossible_requests(changes, message, tmp_path):
    run = read_pool(trained_run(tmp_path))
    with pytest.raises(InputError, match=message):
        measured(run, quick(tmp_path, **changes), None)


def test_a_pool_that_says_too_little(tmp_path):
    run = read_pool(trained_run(tmp_path))
    silent = Pool(tuple(PoolMember(m.name, m.model, m.input_shape) for m in run.members))
    with pytest.raises(InputError, match="--data is missing and the pool names no data set"):
        measured(silent, quick(tmp_path, data=None), None)
    with pytest.raises(InputError, match="--eps is missing and the pool states no one radius"):
        measured(silent, quick(tmp_path), None)
