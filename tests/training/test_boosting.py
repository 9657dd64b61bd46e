"""Runs of boosting: certificates are the engine's, frozen members stay, resumed runs repeat, bad input is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import robboost as rb
from robboost.data import Dataset
from robboost.errors import CheckpointError, DivergedError, InputError
from robboost.models.architectures import build, float32_bytes
from robboost.training import RunOptions, TrainConfig
from robboost.training import boosting as boosting_module
from robboost.training.boosting import Boosted, Stage, boost
from robboost.training.boosting_bounds import frozen_sum
from robboost.training.boosting_config import BoostConfig, load_boost
from robboost.training.boosting_member import SURROGATES, BoostedMember, FrozenNetworks, Objective
from robboost.training.member import DeviceData

SMALL = "conv 4 4x4/2, conv 6 4x4/2, fc 24"
RECIPES = sorted((Path(boosting_module.__file__).parent / "boosting_recipes").glob("*.toml"))


@pytest.fixture(scope="module")
def data() -> Dataset:
    return rb.load_dataset("mnist-small", split="train").take(600)


@pytest.fixture(scope="module")
def heldout() -> Dataset:
    return rb.load_dataset("mnist-small", split="heldout").take(90)


def stage(**entries) -> TrainConfig:
    base = {"architecture": SMALL, "eps": 0.05, "epochs": 4, "batch": 60, "lr": 4e-3, "warmup": 0.1, "batch_norm": True}
    return TrainConfig(**{**base, **entries})


def two_stages(method: str = "ibp", **entries) -> BoostConfig:
    stages = tuple(stage(method=method, seed=seed, crown_share=1.0, epochs=4 - seed) for seed in range(2))
    return BoostConfig("run", "mnist-small", stages, **entries)


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def plain(data: Dataset, heldout: Dataset, tmp_path_factory) -> tuple[Boosted, Path, list[Stage]]:
    out = tmp_path_factory.mktemp("boosting")
    seen: list[Stage] = []
    result = boost(two_stages("crown-ibp"), data, heldout=heldout, options=RunOptions(out=out), on_stage=seen.append)
    return result, out, seen


def test_a_second_member_lowers_the_loss_of_the_training_certificate(plain) -> None:
    result, _, seen = plain
    assert tuple(seen) == result.stages
    first, second = result.stages
    assert second.loss < 0.97 * first.loss
    assert first.verified_error < 0.7
    assert first.verified_error == first.alone_verified_error
    assert second.coefficients == (1.0, 1.0)
    assert second.size_mb == pytest.approx(2 * first.size_mb)
    # Trained for the ensemble, not for itself.
    assert second.alone_verified_error > second.verified_error


def test_members_of_one_pass_for_all_targets_are_boosted_too(data: Dataset, heldout: Dataset) -> None:
    result = boost(two_stages("mean-crown-ibp"), data, heldout=heldout)
    first, second = result.stages
    assert second.loss < 0.97 * first.loss
    assert first.verified_error < 0.7
    assert second.verified_error < second.alone_verified_error
    with pytest.raises(InputError, match=r"crown_share=0.5: expected 1 for method 'mean-crown-ibp'"):
        BoostConfig("run", "mnist-small", (stage(method="mean-crown-ibp", crown_share=0.5),))


def test_every_stage_certifies_what_the_engine_certifies_of_its_file(plain, heldout: Dataset) -> None:
    result, out, _ = plain
    for number, record in enumerate(result.stages, start=1):
        saved = rb.load_model(out / f"run/stage-{number}.safetensors")
        assert len(saved.members) == number
        found = rb.certify(saved, heldout.images, heldout.labels, result.config.threat, method="ibp+crown-ibp")
        assert found.verified_error == pytest.approx(record.verified_error, abs=1e-12)
        assert found.clean_error == pytest.approx(record.clean_error, abs=1e-12)
        attacked = rb.attack(saved, heldout.images, heldout.labels, result.config.threat)
        assert record.clean_error <= attacked.error <= record.verified_error


def test_frozen_members_stay_bit_for_bit(plain) -> None:
    result, out, _ = plain
    first = rb.load_model(out / "run/stage-1.safetensors")
    second = rb.load_model(out / "run/stage-2.safetensors")
    assert torch.equal(parameters(first.members[0]), parameters(second.members[0]))
    assert torch.equal(parameters(result.members[0]), parameters(first.members[0]))
    assert torch.equal(parameters(result.after(2).members[1]), parameters(second.members[1]))


def test_figures_of_a_run_are_written(plain) -> None:
    result, out, _ = plain
    written = json.loads((out / "run/boosting.json").read_text())
    assert written == json.loads(json.dumps(result.to_dict()))
    assert [entry["verified_error"] for entry in written["stages"]] == [s.verified_error for s in result.stages]


@pytest.mark.parametrize("stop", [2, 3])
def test_a_resumed_run_equals_an_uninterrupted_one(
    plain, stop: int, data: Dataset, heldout: Dataset, tmp_path: Path
) -> None:
    """Stopped within the second stage, or behind its last epoch, before the ensemble was certified and written."""
    result, _, _ = plain

    class StopError(Exception):
        pass

    def interrupt(progress) -> None:
        if progress.member.endswith("2-net") and progress.epoch == stop:
            raise StopError

    options = RunOptions(out=tmp_path, report_seconds=0)
    with pytest.raises(StopError):
        boost(two_stages("crown-ibp"), data, heldout=heldout, options=options, progress=interrupt)
    assert (tmp_path / "run/stage-1.safetensors").exists()
    epochs = []
    resumed = boost(
        two_stages("crown-ibp"), data, heldout=heldout, options=options, progress=lambda p: epochs.append(p.epoch)
    )
    assert epochs == list(range(stop + 1, 4))
    for one, two in zip(result.members, resumed.members, strict=True):
        assert torch.equal(parameters(one), parameters(two))
    for one, two in zip(result.stages, resumed.stages, strict=True):
        assert dataclasses.replace(one, seconds=0) == dataclasses.replace(two, seconds=0)
    # A finished run is read, not trained.
    again = boost(two_stages("crown-ibp"), data, heldout=heldout, options=options, progress=lambda p: epochs.append(0))
    assert 0 not in epochs
    assert again.stages == resumed.stages
    with pytest.raises(CheckpointError, match="another configuration"):
        boost(two_stages("crown-ibp", storage="float32"), data, heldout=heldout, options=options)


def test_recomputed_bounds_train_like_stored_ones(plain, data: Dataset, heldout: Dataset) -> None:
    result, _, _ = plain
    again = boost(two_stages("crown-ibp", frozen="recomputed"), data, heldout=heldout)
    assert again.stages[0].verified_error == result.stages[0].verified_error
    # They are tighter while the radius grows; at the end both lower the same loss.
    assert again.stages[1].loss == pytest.approx(result.stages[1].loss, rel=0.05)
    moved = dataclasses.replace(two_stages(frozen="recomputed"), stages=(stage(epochs=1, shift=1), stage(epochs=1)))
    assert len(boost(moved, data.take(300), heldout=heldout).stages) == 2


def test_bounds_are_stored_only_of_images_that_stay_and_within_the_budget(data: Dataset, heldout: Dataset) -> None:
    few = data.take(60)
    rows = 60 * 9 * (784 * 2 + 8)
    expected = [({}, "stored"), ({"budget": rows}, "stored"), ({"budget": rows - 1}, "recomputed")]
    for entries, decided in [*expected, ({"frozen": "recomputed"}, "recomputed")]:
        config = two_stages("crown-ibp", **entries)
        assert boosting_module._Boosting(config, few, heldout, RunOptions(device="cpu")).config.frozen == decided
    moved = BoostConfig("run", "mnist-small", (stage(), stage(shift=1)))
    assert boosting_module._Boosting(moved, few, heldout, RunOptions(device="cpu")).config.frozen == "recomputed"
    # By intervals there is nothing but two numbers a pair.
    config = two_stages(budget=60 * 9 * 8)
    assert boosting_module._Boosting(config, few, heldout, RunOptions(device="cpu")).config.frozen == "stored"


def test_exact_weights_are_no_worse_than_the_sum_where_they_are_fitted(data: Dataset, heldout: Dataset) -> None:
    config = two_stages(reweight="exact", objective=Objective("hinge", 2.0))
    result = boost(config, data, heldout=heldout)
    last = result.stages[-1]
    assert last.coefficients != (1.0, 1.0)
    assert min(last.coefficients) >= 0
    threat = config.threat
    found = rb.certify(result.after(2), heldout.images, heldout.labels, threat, method="ibp+crown-ibp")
    assert found.verified_error == pytest.approx(last.verified_error, abs=1e-12)


def test_rows_belong_to_the_members_with_weight(data: Dataset, heldout: Dataset) -> None:
    """A fit may drop the first member: the rows of the next stage are then of the others, not of as many."""
    threat = rb.Threat(0.05, clip=(0, 1))
    models = [build("fc 12", (1, 28, 28), seed=seed).eval() for seed in range(2)]
    run = boosting_module._Boosting(two_stages("crown-ibp"), data.take(60), heldout, RunOptions(device="cpu"))
    for coefficients in ((1.0,), (0.0, 1.0)):
        used = [(m, c) for m, c in zip(models, coefficients, strict=False) if c > 0]
        rows = run._stored_rows(threat, coefficients, used)
        wanted = frozen_sum([m for m, _ in used], [1.0], run._examples(), threat, "ibp+crown-ibp")
        assert torch.equal(rows.slope, wanted.slope)
        assert torch.equal(rows.points, wanted.points)


def test_early_stop_keeps_the_best_stage(data: Dataset, heldout: Dataset) -> None:
    # The second stage has no time to learn, so it cannot help by more than luck.
    stages = (stage(method="ibp"), *(stage(method="ibp", epochs=1, lr=1e-7, seed=s) for s in range(1, 4)))
    result = boost(BoostConfig("run", "mnist-small", stages, patience=1), data, heldout=heldout)
    errors = [s.verified_error for s in result.stages]
    assert len(result.stages) < 4
    assert errors[-1] >= min(errors[:-1])
    assert len(result.ensemble.members) == errors.index(min(errors)) + 1


@pytest.mark.parametrize("stored", [True, False])
def test_a_step_never_waits_for_the_host(data: Dataset, stored: bool) -> None:
    """What a CUDA graph cannot record (reading a tensor's value) raises on fake tensors."""
    small = data.take(120)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).eval().requires_grad_(False)
    threat = rb.Threat(0.05, clip=(0, 1))
    if stored:
        frozen = frozen_sum([model], [1.0], (small.images, small.labels), threat, "crown-ibp")
    else:
        frozen = FrozenNetworks.of([model], [1.0], (1, 28, 28), "crown-ibp")
    shared = DeviceData.of(small.images, small.labels, pad=0, classes=10, device=torch.device("cpu"))
    config = stage(method="crown-ibp", crown_share=0.5, mixture=0.5)
    member = BoostedMember(config, shared, frozen=frozen, objective=Objective())
    member.begin_epoch(0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        member.step()


def test_a_diverged_stage_is_named(data: Dataset, heldout: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SURROGATES, "hinge", lambda margins, kappa: margins.sum() * torch.inf)
    broken = BoostConfig("run", "mnist-small", (stage(epochs=1),), objective=Objective("hinge"))
    with pytest.raises(DivergedError, match=r"run/1-net: the loss was not finite in epoch 1; expected"):
        boost(broken, data.take(120), heldout=heldout)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"frozen": "cached"}, "frozen='cached'"),
        ({"storage": "int8"}, "storage='int8'"),
        ({"reweight": "yes"}, "reweight='yes'"),
        ({"patience": -1}, "patience=-1"),
        ({"budget": 0}, "budget=0"),
        ({"stages": ()}, "stages"),
        ({"stages": (stage(), stage(eps=0.1))}, "one radius"),
        ({"stages": (stage(method="sabr"),)}, "method='sabr'"),
        ({"stages": (stage(flip=True),), "frozen": "stored"}, "shift and flip"),
    ],
)
def test_wrong_configurations_are_refused(entries, words) -> None:
    with pytest.raises(InputError, match=words):
        BoostConfig(**{"name": "run", "dataset": "mnist", "stages": (stage(),), **entries})


@pytest.mark.parametrize("name", ["mnist-0.3", "cifar10-2-255"])
def test_shipped_configurations_are_the_papers_members(name: str) -> None:
    config = load_boost(name)
    names = {"mnist": "ACEGK", "cifar10": "BGIJK"}[config.dataset]
    assert "".join(s.architecture for s in config.stages) == names
    assert [s.label for s in config.stages] == [f"{config.name}/{n}-{a}" for n, a in enumerate(names, start=1)]
    assert config.with_epochs(2).stages[0].epochs == 2


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_configurations_take_at_most_ten_megabytes(path: Path) -> None:
    config = load_boost(path.stem)
    shape = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}[config.dataset]
    assert config.name == f"boost-{path.stem}"
    assert len(config.stages) == 5
    assert sum(float32_bytes(build(s.architecture, shape, seed=0)) for s in config.stages) <= 10e6


def test_a_configuration_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'dataset = "mnist"\n[boosting]\nsurrogate = "hinge"\nkappa = 0.5\nreweight = "exact"\npatience = 2\n'
        '[defaults]\neps = 0.1\n[[members]]\narchitecture = "A"\n[[members]]\narchitecture = "A"\nseed = 1\n'
    )
    config = load_boost(file)
    assert config.objective == Objective("hinge", 0.5)
    assert (config.name, config.reweight, config.patience) == ("mine", "exact", 2)
    assert [s.label for s in config.stages] == ["mine/1-A", "mine/2-A"]
    file.write_text('dataset = "mnist"\nboosting = {wrong = 1}\n[[members]]\narchitecture = "A"\n')
    with pytest.raises(InputError, match="boosting="):
        load_boost(file)
