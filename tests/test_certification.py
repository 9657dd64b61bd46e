"""Certificates: by hand, against sampled and attacked points, joint against combined, ties and NaN."""

import pytest
import torch
from small_pools import examples, pool
from torch import nn

from robboost import Ensemble, InputError, SoundnessError, Threat, attack, certify, proofs
from robboost.attacks import AttackSettings
from robboost.certification import certify_joint
from robboost.mixtures import mix_margins, pool_bounds, target_classes
from robboost.proofs import prove

POOL = pool()
X, Y = examples(40, seed=7)
METHODS = ["ibp", "crown-ibp", "same-slope", "crown", "tightest", "ibp+crown"]
STAGED = ["ibp>crown", "ibp>crown-ibp>alpha-crown", "ibp>ibp+same-slope"]


def linear(weight, bias=None):
    layer = nn.Linear(len(weight[0]), len(weight), bias=bias is not None)
    layer.weight.data = torch.tensor(weight)
    if bias is not None:
        layer.bias.data = torch.tensor(bias)
    return layer.eval()


@pytest.mark.parametrize(("norm", "dual"), [("linf", 7.0), ("l2", 5.0), ("l1", 4.0)])
def test_linear_network_by_hand(norm, dual):
    # margin_0 = <(3, 4), x> + 2 around x = 0.
    model = linear([[3.0, 4.0], [0.0, 0.0]], [2.0, 0.0])
    result = certify(model, torch.zeros(1, 2), torch.tensor([0]), Threat(0.3, norm), method="crown")
    assert result.margins[0, 0].item() == pytest.approx(2 - 0.3 * dual, abs=1e-6)
    assert bool(result.certified[0]) is (2 - 0.3 * dual > 0)


def test_ensemble_certifies_what_no_member_does():
    # method.md, section 2: A = [2, -2], c = [1, 1]: both members at -1, the average at +1.
    members = [linear([[2.0], [0.0]], [1.0, 0.0]), linear([[-2.0], [0.0]], [1.0, 0.0])]
    x, y, threat = torch.zeros(1, 1), torch.tensor([0]), Threat(1.0)
    for member in members:
        assert certify(member, x, y, threat, method="crown").margins.item() == pytest.approx(-1, abs=1e-6)
    result = certify(Ensemble(members, [0.5, 0.5]), x, y, threat, method="crown")
    assert result.margins.item() == pytest.approx(1, abs=1e-6)
    assert result.certified.all()


def test_scales_divide_and_box_counts():
    member = linear([[1.0, 0.0], [0.0, 0.0]], [0.0, 0.0])
    x, y = torch.tensor([[0.9, 0.5]]), torch.tensor([0])
    with_box = certify(Ensemble([member], [1.0], [4.0]), x, y, Threat(0.5, clip=(0.0, 1.0)), method="crown")
    assert with_box.margins.item() == pytest.approx(0.4 / 4, abs=1e-6)
    assert with_box.box_used
    assert not certify(member, x, y, Threat(0.1, "l2", (0.0, 1.0)), method="crown").box_used


@pytest.mark.parametrize("method", [*METHODS, *STAGED])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_no_point_of_the_set_is_below_the_bound(method, norm):
    threat = Threat({"linf": 0.04, "l2": 0.2, "l1": 0.5}[norm], norm, (0.0, 1.0))
    ensemble = Ensemble(POOL, [0.5, 0.3, 0.2], [2.0, 1.0, 3.0])
    result = certify(ensemble, X, Y, threat, method=method)
    attacked = attack(ensemble, X, Y, threat, certified=result.certified)
    assert (attacked.margins >= result.margins.amin(1)).all()
    assert result.verified_error >= attacked.error >= result.clean_error
    exact, targets = ensemble.double(), target_classes(Y, 3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        for draw in (threat.sample, threat.extreme_points):
            logits = exact(draw(X.double(), generator=generator))
            margins = logits.gather(1, Y[:, None]) - logits.gather(1, targets)
            assert (margins >= result.margins).all()
    ensemble.float()


@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "same-slope", "crown"])
def test_joint_agrees_with_the_sum_of_the_members(method):
    ensemble = Ensemble(POOL, [0.5, 0.3, 0.2], [2.0, 1.0, 3.0])
    combined, joint = (
        how(ensemble, X, Y, Threat(0.05, clip=(0, 1)), method=method) for how in (certify, certify_joint)
    )
    torch.testing.assert_close(joint.margins, combined.margins, atol=1e-5, rtol=1e-5)


def test_several_methods_are_never_worse_than_each():
    ensemble = Ensemble(POOL, [0.4, 0.3, 0.3])
    threat = Threat(0.05, clip=(0, 1))
    best = certify(ensemble, X, Y, threat, method="ibp+crown-ibp+crown").margins
    for method in ("ibp", "crown-ibp", "crown"):
        assert (best >= certify(ensemble, X, Y, threat, method=method).margins - 1e-12).all()


@pytest.mark.parametrize("method", STAGED)
def test_a_later_stage_bounds_what_is_open_as_one_network(method):
    threat = Threat(0.15, clip=(0.0, 1.0))
    ensemble = Ensemble(POOL, [0.5, 0.3, 0.2], [2.0, 1.0, 3.0])
    found = certify(ensemble, X, Y, threat, method=method)
    first, *others = method.split(">")
    wanted = certify(ensemble, X, Y, threat, method=first)
    certified, margins, counted = wanted.certified.clone(), wanted.margins.clone(), 0
    fooled = attack(ensemble, X, Y, threat, settings=AttackSettings(steps=20, restarts=1)).success
    for stage in others:
        joint = certify_joint(ensemble, X, Y, threat, method=stage)
        new = joint.certified & ~certified & ~fooled
        margins[new] = joint.margins[new]
        certified |= new
        counted += int(new.sum())
    assert torch.equal(found.certified, certified)
    assert torch.allclose(found.margins, margins, atol=1e-6)
    assert found.later == counted > 0
    assert f"{counted} certified by later stages" in str(found)
    assert wanted.later == 0


def test_a_stage_is_not_spent_on_what_is_decided(monkeypatch):
    threat, seen = Threat(0.15, clip=(0.0, 1.0)), []
    right = proofs._bounded

    def counted(pool, x, y, threat, mixes, method, *others):
        seen.append((method, len(x)))
        return right(pool, x, y, threat, mixes, method, *others)

    monkeypatch.setattr(proofs, "_bounded", counted)
    first = certify(POOL[0], X, Y, threat, method="ibp")
    fooled = attack(POOL[0], X, Y, threat, settings=AttackSettings(steps=20, restarts=1)).success
    left = int((first.correct & ~first.certified & ~fooled).sum())
    seen.clear()
    certify(POOL[0], X, Y, threat, method="ibp>crown")
    assert [count for method, count in seen if method == "crown"] == [left]
    assert 0 < left < int((~first.certified).sum())
    seen.clear()
    assert certify(POOL[0], X, Y, Threat(0.0), method="ibp>crown").later == 0
    assert [method for method, _ in seen] == ["ibp"]


def test_verdicts_of_mixes_are_refined_each_for_itself():
    threat = Threat(0.15, clip=(0.0, 1.0))
    mixes = [torch.tensor(mix, dtype=torch.float64) for mix in ([1.0, 0.0, 0.0], [0.2, 0.5, 0.9])]
    together = prove(POOL, X, Y, threat, mixes, method="ibp>crown")
    for position, mix in enumerate(mixes):
        alone = prove(POOL, X, Y, threat, [mix], method="ibp>crown")
        assert torch.equal(together.certified[position], alone.certified[0])
        assert torch.allclose(together.margins[position], alone.margins[0])
        assert together.later[position] == alone.later[0] > 0


@pytest.mark.parametrize("method", ["crown>", ">crown", "crown> >ibp"])
def test_an_empty_stage_is_refused(method):
    with pytest.raises(InputError, match="expected methods joined by '>'"):
        certify(POOL[0], X, Y, Threat(0.1), method=method)


def test_tightest_of_each_member_is_among_the_ways():
    bounds = pool_bounds(POOL, X, Y, Threat(0.05), method="ibp+crown")
    mix = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    proof = prove(POOL, X, Y, Threat(0.05), [mix], method="ibp+crown")
    assert (proof.margins[0] >= bounds.mix(mix).lower - 1e-9).all()


def test_rounding_allowance_covers_the_exact_sum():
    generator = torch.Generator().manual_seed(1)
    slopes = torch.randn(3, 4, 2, 500, generator=generator)
    intercepts = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
    radius = torch.rand(4, 500, generator=generator, dtype=torch.float64)
    mix = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    mixed = mix_margins(slopes, intercepts, radius, mix, norm="linf")
    from fractions import Fraction as Q

    for n in range(4):
        for j in range(2):
            exact = sum(Q(mix[t].item()) * Q(intercepts[t, n, j].item()) for t in range(3))
            for i in range(500):
                total = sum(Q(mix[t].item()) * Q(slopes[t, n, j, i].item()) for t in range(3))
                exact -= abs(total * Q(radius[n, i].item()))
            assert Q(mixed.lower[n, j].item()) <= exact
            assert float(exact) - mixed.lower[n, j].item() < 1e-12 * mixed.size[n, j].item()


def test_tie_nan_and_misclassified_are_not_certified():
    tie = linear([[0.0, 0.0], [0.0, 0.0]])
    x, y = torch.rand(3, 2), torch.tensor([0, 1, 0])
    assert not certify(tie, x, y, Threat(0.1), method="crown").certified.any()
    assert certify(tie, x, y, Threat(0.1), method="crown").clean_error == 1
    slopes, intercepts = torch.full((1, 1, 1, 2), torch.nan), torch.ones(1, 1, 1, dtype=torch.float64)
    lower = mix_margins(slopes, intercepts, torch.tensor(0.0), torch.ones(1), norm="linf").lower
    assert not bool((lower > 0).any())
    wrong = certify(POOL[0], X, (Y + 1) % 3, Threat(0.01))
    assert not (wrong.certified & ~wrong.correct).any()
    assert wrong.clean_error > 0.5


def test_close_calls_are_bounded_again_in_float64(monkeypatch):
    import robboost.mixtures as mixtures

    precisions = []
    real = mixtures.margin_bounds
    monkeypatch.setattr(mixtures, "margin_bounds", lambda *a, **k: precisions.append(k["precision"]) or real(*a, **k))
    # margin = 500.005 - 1000 x, 0.005 at the end of the set: a small difference of large numbers.
    model = linear([[-1000.0], [0.0]], [500.005, 0.0])
    result = certify(model, torch.tensor([[0.4]]), torch.tensor([0]), Threat(0.1), method="crown")
    assert result.rechecked == 1
    assert precisions == ["float32", "float64"]
    assert result.margins.item() == pytest.approx(
        float(torch.tensor(500.005)) - 1000 * (float(torch.tensor(0.4)) + 0.1), abs=1e-9
    )


def test_wrong_bounds_are_loud(monkeypatch):
    import robboost.mixtures as mixtures

    real = mixtures.margin_bounds

    def broken(*arguments, **keywords):
        found = real(*arguments, **keywords)
        return type(found)(found.slope * 0, found.intercept * 0 + 1, found.lower, "ibp", "float32", True)

    monkeypatch.setattr(mixtures, "margin_bounds", broken)
    with pytest.raises(SoundnessError, match="misclassified, yet"):
        certify(POOL[0], X, (Y + 1) % 3, Threat(0.01))


def test_result_forms():
    import json

    result = certify(POOL[0], X, Y, Threat(0.02, clip=(0, 1)))
    values = json.loads(result.to_json())
    assert values["verified_error"]["value"] == result.verified_error
    assert result.to_pandas()["certified"].tolist() == result.certified.tolist()
    assert result.to_numpy()["margins"].shape == (len(Y), 2)
    assert "verified error" in str(result)
    assert result._repr_html_().startswith("<pre>")


def test_zero_weight_members_do_not_matter():
    broken = linear([[float("nan")] * 36] * 3)
    flat = nn.Sequential(nn.Flatten(), broken).eval()
    whole = Ensemble([POOL[0], flat], [1.0, 0.0])
    assert torch.equal(certify(whole, X, Y, Threat(0.02)).margins, certify(POOL[0], X, Y, Threat(0.02)).margins)


def test_bad_input():
    for x, y, message in [
        (X[:, :, :5], Y, "does not take"),
        (X, Y + 3, "labels reach"),
        (X[:0], Y[:0], "at least one"),
    ]:
        with pytest.raises(InputError, match=message):
            certify(POOL[0], x, y, Threat(0.1))
    with pytest.raises(InputError, match="method='magic'"):
        certify(POOL[0], X, Y, Threat(0.1), method="magic")
    with pytest.raises(InputError, match="method='magic'"):
        certify(POOL[0], X, Y, Threat(0.1), method="ibp+magic")
    with pytest.raises(InputError, match="expected an Ensemble"):
        certify_joint(POOL[0], X, Y, Threat(0.1))
