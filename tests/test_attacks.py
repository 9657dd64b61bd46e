"""Attacks: the exact worst point of linear networks, membership, judgement, and the alarm."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from robboost import InputError, SoundnessError, Threat, attack
from robboost.attacks import AttackSettings
from robboost.models import load_model
from robboost.models.architectures import build

NORMS = ["linf", "l2", "l1"]


def linear(weight, bias):
    layer = nn.Linear(len(weight[0]), len(weight))
    layer.weight.data, layer.bias.data = torch.tensor(weight), torch.tensor(bias)
    return layer


@pytest.mark.parametrize(("norm", "dual"), [("linf", 7.0), ("l2", 5.0), ("l1", 4.0)])
def test_worst_point_of_a_linear_margin(norm, dual):
    # margin = <(3, 4), x> + 2 at x = 0; worst over the ball: 2 - eps ||(3, 4)||_q.
    model = linear([[3.0, 4.0], [0.0, 0.0]], [2.0, 0.0])
    for eps, success in ((1.9 / dual, False), (2.1 / dual, True)):
        result = attack(model, torch.zeros(1, 2), torch.tensor([0]), Threat(eps, norm))
        assert bool(result.success[0]) is success
        assert result.margins[0].item() == pytest.approx(2 - eps * dual, abs=2e-3)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("clip", [None, (0.0, 1.0)])
@pytest.mark.parametrize("targets", ["untargeted", "targeted"])
def test_points_stay_in_the_set_and_margins_are_true(norm, clip, targets):
    model = build("conv 4 4x4/2, fc 16", (1, 8, 8), num_classes=4, seed=0)
    x, y = torch.rand(6, 1, 8, 8), torch.arange(6) % 4
    threat = Threat({"linf": 0.1, "l2": 0.5, "l1": 3.0}[norm], norm, clip)
    result = attack(model, x, y, threat, settings=AttackSettings(steps=8, targets=targets, batch_size=4))
    assert threat.contains(result.adversarial, x.double(), tolerance=1e-12).all()
    logits = model.double()(result.adversarial)
    true = logits.gather(1, y[:, None])[:, 0]
    other = logits.scatter(1, y[:, None], -torch.inf).amax(1)
    torch.testing.assert_close(result.margins, (true - other).detach())
    natural = model(x.double())
    assert (result.margins <= (natural.gather(1, y[:, None]) - natural).scatter(1, y[:, None], torch.inf).amin(1)).all()
    assert torch.equal(result.success, ~(result.margins > 0))


def test_targeted_and_restarts_never_do_worse_together():
    model = build("conv 4 4x4/2, fc 16", (1, 8, 8), num_classes=4, seed=3)
    x, y = torch.rand(8, 1, 8, 8), torch.arange(8) % 4
    few = attack(model, x, y, Threat(0.1), settings=AttackSettings(steps=5, restarts=1))
    more = attack(model, x, y, Threat(0.1), settings=AttackSettings(steps=5, restarts=1, targets="both"))
    assert (more.margins <= few.margins + 1e-9).all()


@pytest.mark.parametrize(("true", "target"), [(a, b) for a in range(3) for b in range(3) if a != b])
def test_targeted_tries_every_wrong_class(true, target):
    # Only one wrong class has a slope; the most dangerous one, which "untargeted" would follow, has none.
    weight, bias = torch.zeros(3, 1), torch.full((3,), -0.04)
    weight[target], bias[target], bias[true] = 1.0, -0.05, 0.0
    model, x, y = linear(weight.tolist(), bias.tolist()), torch.zeros(1, 1), torch.tensor([true])
    once = AttackSettings(steps=5, restarts=1)
    assert not attack(model, x, y, Threat(0.1), settings=once).success[0]
    assert attack(model, x, y, Threat(0.1), settings=replace(once, targets="targeted")).success[0]


def test_momentum_crosses_a_plateau():
    class Terrace(nn.Module):  # the margin falls up to 0.05, is level up to 0.5, and negative beyond
        def forward(self, x):
            level = torch.where(x < 0.05, 1 - x, torch.where(x < 0.5, 0.95 + 0 * x, -1 + 0 * x))
            return torch.cat([level, torch.zeros_like(x)], 1)

    x, y = torch.zeros(1, 1), torch.tensor([0])
    for momentum, found in ((0.75, True), (0.0, False)):
        settings = AttackSettings(restarts=1, momentum=momentum)
        assert attack(Terrace(), x, y, Threat(0.6), settings=settings).success.tolist() == [found]


def test_a_projection_that_leaves_the_set_is_noticed(monkeypatch):
    real = Threat.project
    monkeypatch.setattr(Threat, "project", lambda threat, point, x: real(threat, point, x) + 2 * threat.eps)
    with pytest.raises(SoundnessError, match="projection left the threat set"):
        attack(linear([[3.0, 4.0], [0.0, 0.0]], [2.0, 0.0]), torch.zeros(1, 2), torch.tensor([0]), Threat(0.1))


def test_momentum_does_not_leave_a_maximum_where_it_starts():
    # |x| has gradient zero at the start: only a restart leaves it.
    class Ridge(nn.Module):
        def forward(self, x):
            return torch.cat([1 - x.abs().sum(1, keepdim=True), torch.zeros(len(x), 1, dtype=x.dtype)], 1)

    once = attack(Ridge(), torch.zeros(1, 2), torch.tensor([0]), Threat(0.6), settings=AttackSettings(restarts=1))
    again = attack(Ridge(), torch.zeros(1, 2), torch.tensor([0]), Threat(0.6), settings=AttackSettings(restarts=2))
    assert not once.success[0]
    assert again.success[0]


def test_same_seed_same_points_and_mode_is_restored():
    model = build("fc 8", (1, 4, 4), seed=0).train()
    x, y = torch.rand(5, 1, 4, 4), torch.zeros(5, dtype=torch.int64)
    first, second = attack(model, x, y, Threat(0.2)), attack(model, x.numpy(), y.numpy(), Threat(0.2))
    assert torch.equal(first.adversarial, second.adversarial)
    assert model.training
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_eps_zero_is_clean_error():
    model = build("fc 8", (1, 4, 4), num_classes=3, seed=0)
    x, y = torch.rand(20, 1, 4, 4), torch.arange(20) % 3
    result = attack(model, x, y, Threat(0.0))
    assert torch.equal(result.success, result.clean)
    assert torch.equal(result.success, model(x).argmax(1) != y)


def test_nan_is_a_success():
    class Broken(nn.Module):
        def forward(self, x):
            return torch.stack([1 - x[:, 0], torch.where(x[:, 0] > 0.05, torch.nan, 0 * x[:, 0])], 1)

    result = attack(Broken(), torch.zeros(1, 1), torch.tensor([0]), Threat(0.1))
    assert result.success[0]


def test_success_on_a_certified_example_is_loud_and_reproducible(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = linear([[3.0, 4.0], [0.0, 0.0]], [2.0, 0.0])
    x, y = torch.zeros(2, 2), torch.tensor([0, 0])
    with pytest.raises(SoundnessError, match=r"first index 1 \(label 0.*seed 0"):
        attack(model, x, y, Threat(0.5), certified=torch.tensor([False, True]))
    saved = np.load(tmp_path / "robboost-counterexample-1.npz")
    point = torch.from_numpy(saved["point"])
    assert saved["index"].tolist() == [1]
    assert torch.equal(torch.from_numpy(saved["image"]), x[1:])
    about = json.loads(str(saved["about"]))
    assert about["threat"] == {"eps": 0.5, "norm": "linf", "clip": None}
    assert AttackSettings(**about["settings"]) == AttackSettings()
    # From the files alone: the network is wrong at the point, and the point is in the set of the image.
    again = load_model(tmp_path / "robboost-counterexample-1.safetensors").double()
    logits = again(point)
    assert (logits[0, 1] - logits[0, 0]).item() == pytest.approx(-saved["margin"][0])
    assert Threat(0.5).contains(point, x[1:].double(), tolerance=1e-12).all()
    assert model.double()(point)[0].diff().item() >= 0
    model.float()
    attack(model, x, y, Threat(0.1), certified=torch.tensor([True, True]))


def test_a_counterexample_finds_a_place_to_be_saved(tmp_path, monkeypatch):
    class Own(nn.Module):  # cannot be saved as a network, and the folder cannot be written
        def forward(self, x):
            return torch.cat([torch.cos(9 * x[:, :1]), torch.zeros_like(x[:, :1])], 1)

    monkeypatch.chdir(tmp_path)
    real = np.savez

    def full(path, **arrays):
        if str(path).startswith(str(tmp_path / "robboost")):
            raise OSError(28, "No space left on device")
        real(path, **arrays)

    monkeypatch.setattr(np, "savez", full)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    with pytest.raises(SoundnessError, match=r"other/robboost-.*, network not saved \(.*no bound rule"):
        attack(Own(), torch.zeros(1, 2), torch.tensor([0]), Threat(0.5), certified=torch.tensor([True]))
    (tmp_path / "other" / "robboost-counterexample-0.npz").unlink()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "robboost-nowhere"))
    with pytest.raises(SoundnessError, match="point not saved: No space left"):
        attack(Own(), torch.zeros(1, 2), torch.tensor([0]), Threat(0.5), certified=torch.tensor([True]))


def test_forms():
    model = linear([[3.0, 4.0], [0.0, 0.0]], [2.0, 0.0])
    result = attack(model, torch.zeros(2, 2), torch.tensor([0, 1]), Threat(0.1))
    assert result.to_numpy()["adversarial"].shape == (2, 2)
    assert result.to_pandas()["success"].tolist() == [False, True]
    assert json.loads(result.to_json())["attack_error"]["count"] == 1
    assert result._repr_html_().startswith("<pre>")
    assert "attack error   50.00" in str(result)


def test_progress_counts_examples():
    seen = []
    model = linear([[3.0, 4.0], [0.0, 0.0]], [2.0, 0.0])
    x, y, settings = torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64), AttackSettings(1, 2, batch_size=2)
    attack(model, x, y, Threat(0.1), settings=settings, progress=lambda *step: seen.append(step))
    assert seen[-1] == ("attack", 5, 5)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_bad_input():
    model, x, y = build("fc 8", (1, 4, 4), num_classes=3, seed=0), torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 2, 0])
    for bad_x, bad_y, message in [
        (x[:, :, :3], y, "does not take images of shape"),
        (x, y[:2], "4 images and 2 labels"),
        (x, y + 1, "labels reach from 1 to 3"),
        (x, y.float(), "y is torch.float32"),
        (x * torch.nan, y, "NaN"),
        ((255 * x).byte(), y, "x is torch.uint8"),
        (x[:0], y[:0], "at least one image"),
        ("x", y, "x is a str"),
    ]:
        with pytest.raises(InputError, match=message):
            attack(model, bad_x, bad_y, Threat(0.1))
    with pytest.raises(InputError, match="model is a str"):
        attack("net.onnx", x, y, Threat(0.1))
    with pytest.raises(InputError, match="certified is"):
        attack(model, x, y, Threat(0.1), certified=torch.tensor([1.0]))
    for field, value in [("steps", 0), ("restarts", 0), ("momentum", 1.0), ("step", 0.0), ("targets", "all")]:
        with pytest.raises(InputError, match=field):
            AttackSettings(**{field: value})
