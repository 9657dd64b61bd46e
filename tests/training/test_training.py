"""Runs: every method improves its certificate, resumed runs repeat, masks hold, bad input is refused in one line."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

import robboost as rb
from robboost.data import Dataset
from robboost.errors import CheckpointError, DivergedError, InputError
from robboost.models import PixelMask, read_pool
from robboost.training import Progress, RunOptions, TrainConfig, train, train_pool
from robboost.training import __main__ as training_main
from robboost.training import member as member_module
from robboost.training.losses import LOSSES, METHODS
from robboost.training.manifest import save_pool
from robboost.training.member import DeviceData, Member

SMALL = "conv 6 4x4/2, conv 8 4x4/2, fc 32"


@pytest.fixture(scope="module")
def data() -> Dataset:
    return rb.load_dataset("mnist-small", split="train").take(1200)


@pytest.fixture(scope="module")
def heldout() -> Dataset:
    return rb.load_dataset("mnist-small", split="heldout").take(200)


def config(**entries) -> TrainConfig:
    base = {"architecture": SMALL, "eps": 0.05, "epochs": 4, "batch": 60, "lr": 3e-3, "warmup": 0.1, "batch_norm": True}
    return TrainConfig(**{**base, **entries})


@pytest.mark.parametrize("method", [*METHODS, "wong-kolter with projections"])
def test_a_tiny_run_of_every_method_improves_its_figures(method: str, data: Dataset, heldout: Dataset) -> None:
    method, *estimated = method.split(" with ")
    mixture = 0.5 if method in ("mtl-ibp", "cc-ibp") else 0.9
    # Exact dual bounds take one backward pass for each hidden neuron behind the first layer: those are few here.
    shape = "conv 4 4x4/4, fc 24" if method == "wong-kolter" else SMALL
    chosen = config(method=method, mixture=mixture, architecture=shape, train_eps=0.06, projections=9 * len(estimated))
    trained = train(chosen, data, heldout=heldout)
    assert trained.figures is not None
    errors = trained.figures.errors()
    assert len(trained.history) == 4
    if method in ("natural", "adversarial"):
        assert errors["clean_error"] < 0.35
    else:
        assert errors["verified_error"] < 0.65  # 0.9 for a guess
    if method == "wong-kolter":
        assert errors["verified_error"] <= errors["same_slope_error"] < 0.65
    assert ("estimated_from" in trained.history[-1]) == (bool(estimated) or method == "mean-crown-ibp")
    assert errors["clean_error"] <= errors["verified_error"] <= min(errors["ibp_error"], errors["crown_ibp_error"])
    wrong = (trained.model(heldout.images).argmax(1) != heldout.labels).float().mean().item()
    assert wrong == pytest.approx(errors["clean_error"], abs=0.011)


# One of every method, the options that draw random numbers or keep a state of their own among them.
FAMILIES = [
    {"method": "natural", "shift": 1, "flip": True},
    {"method": "adversarial", "attack_steps": 2},
    {"method": "ibp", "average": 0.9, "pixel_share": 0.8, "l1": 1e-5},
    {"method": "crown-ibp", "crown_share": 0.5, "mixture": 0.7},
    {"method": "fused-crown-ibp", "crown_share": 0.5, "mixture": 0.7},
    {"method": "mean-crown-ibp", "crown_share": 1.0, "flip": True},
    {"method": "wong-kolter", "batch_norm": False},
    {"method": "wong-kolter", "projections": 7, "average": 0.9, "name": "estimated"},
    {"method": "mtl-ibp", "mixture": 0.5, "shift": 1, "average": 0.9},
    {"method": "cc-ibp", "mixture": 0.5},
    {"method": "sabr", "epochs": 1},
]


def test_a_resumed_run_equals_an_uninterrupted_one(data: Dataset, tmp_path: Path) -> None:
    assert {family["method"] for family in FAMILIES} == set(METHODS)
    small = data.take(240)
    tiny = {"architecture": "conv 4 4x4/4, fc 16", "epochs": 3}
    chosen = [config(**{**tiny, **family}) for family in FAMILIES]
    whole = train_pool(chosen, small)

    class StopError(Exception):
        pass

    def interrupt(progress: Progress) -> None:
        if progress.epoch == 1 and progress.member == chosen[-1].label:
            raise StopError

    options = RunOptions(out=tmp_path, report_seconds=0)
    with pytest.raises(StopError):
        train_pool(chosen, small, options=options, progress=interrupt)
    seen: list[Progress] = []
    resumed = train_pool(chosen, small, options=options, progress=seen.append)
    assert min(p.epoch for p in seen if p.member != chosen[-1].label) == 2
    for one, two in zip(whole, resumed, strict=True):
        assert one.history == two.history, one.config.label
        for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
            assert torch.equal(a, b), one.config.label


def test_a_seed_repeats_a_run_and_another_does_not(data: Dataset) -> None:
    small = data.take(300)
    first, again, other = (train(config(epochs=1, seed=seed), small) for seed in (3, 3, 4))
    weights = [torch.cat([p.flatten() for p in run.model.parameters()]) for run in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2])


def test_a_pool_trains_each_member_as_if_alone(data: Dataset) -> None:
    small = data.take(300)
    configs = [
        config(epochs=1),
        config(epochs=2, seed=1, batch=100, shift=2, flip=True),
        config(epochs=1, l1=1e-4, seed=2),
    ]
    together = train_pool(configs, small)
    for chosen, trained in zip(configs, together, strict=True):
        alone = train(chosen, small)
        for a, b in zip(alone.model.parameters(), trained.model.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-6)


def test_files_of_a_run(data: Dataset, tmp_path: Path) -> None:
    chosen = config(epochs=2, name="one", pool="p")
    trained = train(chosen, data.take(300), options=RunOptions(out=tmp_path))
    entries = [json.loads(line) for line in (tmp_path / "p/one.log.jsonl").read_text().splitlines()]
    assert entries == trained.history
    assert [entry["epoch"] for entry in entries] == [1, 2]
    assert entries[-1]["eps"] == pytest.approx(0.05)
    saved = tmp_path / "p/one.safetensors"
    described = rb.models.read_metadata(saved)
    assert TrainConfig(**described.notes["config"]) == chosen
    assert described.input_shape == (1, 28, 28)
    loaded = rb.load_model(saved)
    for one, two in zip(loaded.parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_pool_is_saved_with_a_manifest(data: Dataset, heldout: Dataset, tmp_path: Path) -> None:
    chosen = [config(epochs=1, pool="p", pixel_share=0.9), config(epochs=1, pool="p", seed=1)]
    trained = train_pool(chosen, data.take(300), heldout=heldout, options=RunOptions(out=tmp_path))
    save_pool(tmp_path / "p", trained, data, entries={"eps": 0.05})
    pool = read_pool(tmp_path / "p")
    assert pool.names == ("net-ibp-0", "net-ibp-1")
    assert pool.notes == {"dataset": "mnist-small", "eps": 0.05}
    for member, run in zip(pool.members, trained, strict=True):
        assert TrainConfig(**member.config) == run.config
        assert member.seed == run.config.seed
        assert run.figures is not None
        assert member.metrics["heldout_verified_error"] == run.figures.verified_error
        assert torch.equal(member.model(heldout.images), run.model(heldout.images))
    (tmp_path / "p/net-ibp-1.safetensors").write_bytes(b"changed")
    with pytest.raises(CheckpointError, match="net-ibp-1"):
        read_pool(tmp_path / "p")
    lost = [dataclasses.replace(run, diverged=True) for run in trained]
    assert save_pool(tmp_path / "q", lost, data) is None


def test_training_sees_the_train_split_and_measures_on_heldout_alone(
    data: Dataset, heldout: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.toml").write_text(
        'name = "p"\ndataset = "mnist-small"\n[[members]]\narchitecture = "conv 4 4x4/4"\nbatch = 50\n'
    )
    asked: list[str] = []
    seen: list[torch.Tensor] = []

    def load(name: str, *, split: str) -> Dataset:
        asked.append(split)
        return rb.load_dataset(name, split=split)

    def spy(configs, images, **rest):
        seen.append(images.indices)
        assert images.split == "train"
        assert rest["heldout"].split == "heldout"
        return train_pool(configs, images, **rest)

    monkeypatch.setattr(training_main, "load_dataset", load)
    monkeypatch.setattr(training_main, "train_pool", spy)
    arguments = [str(tmp_path / "p.toml"), "--out", str(tmp_path), "--epochs", "1", "--limit", "200", "--device", "cpu"]
    assert training_main.main(arguments) == 0
    assert asked == ["train", "heldout"]  # never "test"
    everything = rb.load_dataset("mnist-small", split="heldout").indices
    assert not set(seen[0].tolist()) & set(everything.tolist())


@pytest.mark.full_data
@pytest.mark.skipif("ROBBOOST_DATA" not in os.environ, reason="needs the official files in ROBBOOST_DATA")
@pytest.mark.parametrize(("name", "count"), [("mnist", 55_000), ("cifar10", 45_000)])
def test_official_training_images_and_the_5000_held_out_are_apart(name: str, count: int) -> None:
    images, held = (rb.load_dataset(name, split=split, download=False) for split in ("train", "heldout"))
    assert len(images) == count
    assert len(held) == 5_000
    assert not set(images.indices.tolist()) & set(held.indices.tolist())
    digests = {hash(image.numpy().tobytes()) for image in held.images}
    twice = sum(hash(image.numpy().tobytes()) in digests for image in images.images)
    assert twice <= 5  # CIFAR-10 itself holds a few images twice


def test_a_pixel_mask_is_inside_the_network(data: Dataset) -> None:
    trained = train(config(epochs=1, pixel_share=0.8, batch_norm=False), data.take(300))
    assert isinstance(trained.model[0], PixelMask)
    mask = trained.model[0].mask
    assert mask.shape == (1, 1, 28, 28)
    assert mask.sum().item() == round(0.8 * 784)
    x = data.images[:5]
    unseen = torch.where(mask == 0, torch.rand_like(x), x)
    assert torch.equal(trained.model(x), trained.model(unseen))


def test_augmentation_moves_and_mirrors_whole_images(data: Dataset) -> None:
    shared = DeviceData.of(data.images[:100], data.labels[:100], pad=3, classes=10, device=torch.device("cpu"))
    member = Member(config(batch=100, shift=2, flip=True), shared)
    member.begin_epoch(0)
    order, moves = member.order[0], member.moves[0]
    x = member._images(order, torch.zeros(1, dtype=torch.int64)).permute(0, 3, 1, 2)
    for image, source, (down, right, mirrored) in zip(x, order, moves.tolist(), strict=True):
        padded = torch.nn.functional.pad(data.images[source], (2, 2, 2, 2))
        expected = padded[:, down : down + 28, right : right + 28]
        assert torch.equal(image, expected.flip(2) if mirrored else expected)
    assert {0, 4} <= set(moves[:, 0].tolist())
    assert set(moves[:, 2].tolist()) == {0, 1}


def test_the_first_step_of_adam_is_pytorchs(data: Dataset) -> None:
    chosen = config(method="natural", batch_norm=False, clip_norm=0.5, l1=1e-3, epochs=1)
    shared = DeviceData.of(data.images, data.labels, pad=0, classes=10, device=torch.device("cpu"))
    member = Member(chosen, shared)
    module = member.net.module(member.flat.detach())
    optimizer = torch.optim.Adam(module.parameters(), lr=chosen.lr)
    member.begin_epoch(0)
    for step in range(3):
        batch = member.order[step]
        loss = torch.nn.functional.cross_entropy(module(data.images[batch]), data.labels[batch])
        l1 = sum(p.abs().sum() for p in module.parameters() if p.dim() > 1)
        optimizer.zero_grad()
        (loss + chosen.l1 * l1).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        member.step()
        assert torch.allclose(member.net.flat_of(module), member.flat.detach(), atol=2e-6)


def test_a_diverging_run_is_stopped_and_said(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    natural = LOSSES["natural"]

    def explodes(situation):
        loss, margins = natural(situation)
        return loss * torch.where(situation.batch.eps > 0.02, torch.inf, 1.0), margins

    monkeypatch.setitem(member_module.LOSSES, "natural", explodes)
    with pytest.raises(DivergedError, match=r"the loss was not finite in epoch 3; expected"):
        train(config(method="natural", warmup=0.25), data.take(300))
    steady, lost = train_pool([config(), config(method="natural", seed=1)], data.take(300))
    assert not steady.diverged
    assert len(steady.history) == 4
    assert lost.diverged


def test_a_time_limit_cuts_the_epochs(data: Dataset) -> None:
    trained = train(config(epochs=2000), data.take(300), options=RunOptions(minutes=0.03))
    assert 1 <= len(trained.history) <= trained.config.epochs < 2000
    if trained.config.epochs >= 4:  # on a busy machine it may be one, with the whole ramp in it
        assert trained.history[0]["eps"] < 0.05


def test_a_time_limit_is_no_trouble_for_a_run_of_a_single_step(data: Dataset) -> None:
    """Steps are timed before the run, and the schedule has no row for more of them than the run has."""
    trained = train(config(epochs=1), data.take(60), options=RunOptions(minutes=1))
    plain = train(config(epochs=1), data.take(60))
    assert trained.history == plain.history


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"minutes": 0.0}, "minutes=0: expected a finite number above 0"),
        ({"minutes": float("nan")}, "minutes=nan"),
        ({"streams": 0}, "streams=0: expected at least 1"),
        ({"device": "gpu9"}, "device 'gpu9': cannot be used here"),
    ],
)
def test_where_and_how_long_is_checked(entries: dict, message: str) -> None:
    with pytest.raises(InputError) as caught:
        _ = RunOptions(**entries).chosen_device
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_input_is_refused(data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one configuration"):
        train_pool([], data)
    with pytest.raises(InputError, match="different names"):
        train_pool([config(), config()], data)
    with pytest.raises(InputError, match="batch=60: larger than the 50"):
        train(config(), data.take(50))
    with pytest.raises(InputError, match="does not fit images"):
        train(config(architecture="conv 4 4x4/4, conv 4 4x4/4, conv 4 4x4/4"), data)
    train(config(epochs=1), data.take(300), options=RunOptions(out=tmp_path))
    other = dataclasses.replace(config(epochs=1), lr=1e-4)
    with pytest.raises(CheckpointError, match="another configuration"):
        train(other, data.take(300), options=RunOptions(out=tmp_path))
    next(tmp_path.glob("*.state")).write_bytes(b"no state")
    with pytest.raises(CheckpointError, match="cannot be read"):
        train(config(epochs=1), data.take(300), options=RunOptions(out=tmp_path))
