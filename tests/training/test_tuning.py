"""Joint fine-tuning: the loss is the engine's certificate, every member moves, runs repeat, nothing gets worse."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import robboost as rb
from robboost.data import Dataset
from robboost.errors import InputError
from robboost.models.architectures import build
from robboost.training import RunOptions, TrainConfig, train_pool
from robboost.training.boosting_member import Objective
from robboost.training.member import DeviceData
from robboost.training.tuning import TuneConfig, fine_tune
from robboost.training.tuning_member import JointMember

STRUCTURES = ["conv 4 4x4/2, conv 6 4x4/2, fc 24", "fc 30"]


@pytest.fixture(scope="module")
def data() -> Dataset:
    return rb.load_dataset("mnist-small", split="train").take(600)


@pytest.fixture(scope="module")
def heldout() -> Dataset:
    return rb.load_dataset("mnist-small", split="heldout").take(90)


@pytest.fixture(scope="module")
def start(data: Dataset) -> rb.Ensemble:
    entries = {"eps": 0.05, "epochs": 3, "batch": 60, "lr": 4e-3}
    configs = [TrainConfig(s, seed=n, pixel_share=1 - 0.2 * n, **entries) for n, s in enumerate(STRUCTURES)]
    pool = [trained.model for trained in train_pool(configs, data)]
    return rb.Ensemble(pool, [0.6, 0.4], [1.0, 0.5], names=["one", "two"])


def settings(**entries) -> TuneConfig:
    base = {"method": "ibp", "eps": 0.05, "epochs": 2, "batch": 60, "lr": 2e-3, "warmup": 0.0, "ramp": 0.0}
    names = {field.name for field in dataclasses.fields(TuneConfig)}
    own = {name: entries.pop(name) for name in list(entries) if name in names}
    return TuneConfig(TrainConfig("joint", name="tuned", crown_share=1.0, **{**base, **entries}), **own)


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.flatten() for p in model.parameters()])


@pytest.mark.parametrize("method", ["ibp", "crown-ibp"])
def test_the_loss_of_a_step_is_that_of_the_engines_certificate(method: str, start, data: Dataset) -> None:
    few = data.take(60)
    shared = DeviceData.of(few.images, few.labels, pad=0, classes=10, device=torch.device("cpu"))
    config = settings(method=method)
    coefficients = start.coefficients().tolist()
    member = JointMember(config.train, shared, members=list(start.members), coefficients=coefficients,
                         objective=Objective(), reweighting=None)  # fmt: skip
    member.begin_epoch(0)
    before = member.flat.detach().clone()
    member.step()
    assert not torch.equal(before[:100], member.flat[:100])
    assert not torch.equal(before[-100:], member.flat[-100:])
    order = member.order.flatten()
    x, y = few.images[order], few.labels[order]
    bounds = rb.margin_bounds(start, x, y, config.threat, method)
    lower = bounds.lower
    if method == "ibp":  # intervals of the sum of the members, each with its own
        parts = [rb.margin_bounds(m, x, y, config.threat, "ibp").lower for m in start.members]
        lower = sum(c * part for c, part in zip(coefficients, parts, strict=True))
    assert member.log[0, 0].item() == pytest.approx(Objective()(lower).item(), rel=1e-4)
    assert member.log[0, 1].item() == pytest.approx((lower > 0).all(1).float().mean().item(), abs=1e-6)


def test_a_step_never_waits_for_the_host(start, data: Dataset) -> None:
    """What a CUDA graph cannot record (reading a tensor's value) raises on fake tensors."""
    few = data.take(60)
    shared = DeviceData.of(few.images, few.labels, pad=0, classes=10, device=torch.device("cpu"))
    member = JointMember(settings(method="crown-ibp", mixture=0.5).train, shared, members=list(start.members),
                         coefficients=[0.5, 2.0], objective=Objective(), reweighting=None)  # fmt: skip
    member.begin_epoch(0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        member.step()


@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "mean-crown-ibp"])
def test_tuning_certifies_more_and_leaves_the_start_alone(method: str, start, data: Dataset, heldout: Dataset) -> None:
    before = parameters(start).clone()
    config = settings(method=method, reweight_every=1, mixture=0.9)
    tuned = fine_tune(start, config, data, heldout=heldout)
    assert torch.equal(parameters(start), before)
    assert tuned.errors[tuned.chosen]["verified_error"] < tuned.errors["start"]["verified_error"]
    found = rb.certify(tuned.ensemble, heldout.images, heldout.labels, config.threat, method="ibp+crown-ibp")
    assert found.verified_error == pytest.approx(tuned.errors[tuned.chosen]["verified_error"], abs=1e-12)
    losses = [entry["loss"] for entry in tuned.history]
    assert losses[-1] < losses[0]
    assert set(tuned.ensemble.names) <= {"one", "two"}  # exact weights may leave one out


def test_a_resumed_run_equals_an_uninterrupted_one(start, data: Dataset, heldout: Dataset, tmp_path: Path) -> None:
    config = settings(reweight_every=1)
    whole = fine_tune(start, config, data.take(240), heldout=heldout)

    class StopError(Exception):
        pass

    def interrupt(progress) -> None:
        if progress.epoch == 1:
            raise StopError

    options = RunOptions(out=tmp_path, report_seconds=0)
    with pytest.raises(StopError):
        fine_tune(start, config, data.take(240), heldout=heldout, options=options, progress=interrupt)
    # What the interrupted run leaves is the mix as it was: two members, both moved.
    left = rb.load_model(tmp_path / "stages/tuned.safetensors")
    assert isinstance(left, rb.Ensemble)
    assert not any(torch.equal(parameters(a), parameters(b)) for a, b in zip(left.members, start.members, strict=True))
    resumed = fine_tune(start, config, data.take(240), heldout=heldout, options=options)
    assert resumed.history == whole.history
    assert resumed.errors == whole.errors
    assert torch.equal(parameters(resumed.ensemble), parameters(whole.ensemble))
    saved = rb.load_model(tmp_path / "tuned.safetensors")
    x = heldout.images[:5]
    assert torch.equal(saved(x), resumed.ensemble(x))


def test_a_start_that_cannot_be_beaten_is_kept(start, data: Dataset, heldout: Dataset) -> None:
    """At a learning rate of 1 the members are destroyed; what comes back is the start."""
    tuned = fine_tune(start, settings(lr=1.0, epochs=1, reweight_every=0), data.take(240), heldout=heldout)
    assert tuned.chosen == "start"
    assert torch.equal(parameters(tuned.ensemble), parameters(start))


def test_members_without_weight_are_left_out(start, data: Dataset, heldout: Dataset) -> None:
    lone = rb.Ensemble(list(start.members), [1.0, 0.0], names=["one", "two"])
    tuned = fine_tune(lone, settings(epochs=1), data.take(240), heldout=heldout)
    assert tuned.ensemble.names == ("one",)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"method": "natural"}, "method='natural'"),
        ({"batch_norm": True}, "batch_norm"),
        ({"reweight_every": -1}, "reweight_every=-1"),
        ({"damping": 0.0}, "damping=0"),
    ],
)
def test_wrong_settings_are_refused(entries, words) -> None:
    with pytest.raises(InputError, match=words):
        settings(**entries)


def test_members_of_another_number_of_classes_are_refused(data: Dataset) -> None:
    shared = DeviceData.of(data.images, data.labels, pad=0, classes=10, device=torch.device("cpu"))
    odd = build("fc 5", (1, 28, 28), num_classes=3, seed=0)
    with pytest.raises(InputError, match="classes"):
        JointMember(
            settings().train, shared, members=[odd], coefficients=[1.0], objective=Objective(), reweighting=None
        )
