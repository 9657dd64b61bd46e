"""RobBoost.fit: never worse than best and uniform where it chooses, limits, protocol, bad input."""

import json

import pytest
import torch
from small_pools import examples, pool
from torch import nn

from robboost import InputError, RobBoost, Threat, certify, margin_bounds
from robboost.mixtures import pool_bounds

POOL = pool()
X, Y = examples(60, seed=11)
THREAT = Threat(0.14, clip=(0, 1))


@pytest.fixture(scope="module")
def bounds():
    return pool_bounds(POOL, X, Y, THREAT, method="crown")


def test_fit_returns_self_with_a_proved_optimum():
    fitted = RobBoost(THREAT, bounds="crown")
    assert fitted.fit(POOL, X, Y) is fitted
    assert fitted.weights.sum().item() == pytest.approx(1)
    assert (fitted.weights >= 0).all()
    assert fitted.solution.lower_bound <= fitted.solution.objective
    assert fitted.solution.gap <= 1e-6
    assert (fitted.scales > 0).all()
    assert certify(fitted.ensemble, X, Y, THREAT, method="crown").verified_error <= 1


def test_forms(bounds):
    fitted = RobBoost(THREAT, bounds="crown")
    assert fitted.bounds == "crown"
    fitted.fit_bounds(dict(zip("ab<", POOL, strict=True)), bounds)
    assert fitted.bounds is fitted.bounds_ is bounds
    assert fitted.get_params()["bounds"] == "crown"
    assert RobBoost(**fitted.get_params()).get_params() == fitted.get_params()
    assert json.loads(fitted.to_json())["weights"] == fitted.to_numpy()["weights"].tolist()
    assert fitted.to_pandas().loc["b", "weight"] == fitted.weights[1].item()
    assert "&lt;" in fitted._repr_html_()
    solution = fitted.solution
    assert solution.to_pandas()["weight"].tolist() == list(solution.weights)
    assert solution.to_numpy()["passes"].tolist() == [step.passes for step in solution.history]
    assert solution._repr_html_().startswith("<pre>")
    found = margin_bounds(POOL[0], X[:4], Y[:4], THREAT, method="crown")
    assert found.to_numpy()["slope"].shape == (4, 2, 1, 6, 6)
    assert "margins of 4 images against 2 targets each, crown, float32, within the box" in str(found)
    assert found._repr_html_().startswith("<pre>")


def test_never_worse_on_the_validation_part(bounds):
    fitted = RobBoost(THREAT, bounds="crown").fit_bounds(POOL, bounds)
    ranks = {candidate.name: candidate.rank for candidate in fitted.candidates}
    assert fitted.chosen.rank == min(ranks.values()) or fitted.chosen.rank < min(ranks.values())
    assert fitted.chosen.rank <= ranks["uniform"]
    # Recomputed here from the bounds, not from what the fit says of itself.
    part = bounds.take(torch.arange(2, 60, 3))

    def errors(weights):
        mix = weights / fitted.scales
        return int((~((part.mix(mix).lower > 0).all(1) & part.correct(mix))).sum())

    assert errors(fitted.weights) == fitted.chosen.verified.count
    singles = [errors(unit) for unit in torch.eye(3, dtype=torch.float64)]
    assert errors(fitted.weights) <= min([*singles, errors(torch.full((3,), 1 / 3, dtype=torch.float64))])


def test_an_uneven_pool_does_not_lose_to_its_best_member():
    # A member with enormous margins and a wrong idea pulls the hinge optimum; the guard must hold.
    bad = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).eval()
    fitted = RobBoost(THREAT, bounds="crown").fit([POOL[0], bad], X, Y)
    alone = RobBoost(THREAT, bounds="crown").fit([POOL[0]], X, Y)
    assert fitted.chosen.verified.count <= alone.chosen.verified.count


def test_limits(bounds):
    one = RobBoost(THREAT, bounds="crown", max_members=1).fit_bounds(POOL, bounds)
    assert int((one.weights > 0).sum()) == 1
    two = RobBoost(THREAT, bounds="crown", max_members=2).fit_bounds(POOL, bounds)
    assert int((two.weights > 0).sum()) <= 2
    small = RobBoost(THREAT, bounds="crown", max_megabytes=0.003).fit_bounds(POOL, bounds)
    assert small.ensemble.size_mb <= 0.003
    with pytest.raises(InputError, match="max_megabytes=1e-09"):
        RobBoost(THREAT, max_megabytes=1e-9).fit_bounds(POOL, bounds)


def test_fixed_kappa_and_methods(bounds):
    for method in ("auto", "coordinate", "uniform"):
        fitted = RobBoost(THREAT, kappa=0.5, method=method).fit_bounds(POOL, bounds)
        assert fitted.kappa_ == 0.5
        assert len(fitted.candidates) == 4  # on all images, on the part, best member, uniform
        best = fitted.candidates[2]
        assert best.name == f"member {fitted.names[best.weights.index(1.0)]} alone"


def test_negative_mean_intercept_falls_back_to_a_positive_scale():
    # A member that ranks the classes upside down has a negative mean intercept.
    class Upside(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) * -1.0

    fitted = RobBoost(THREAT, bounds="crown").fit({"good": POOL[0], "bad": Upside(POOL[0]).eval()}, X, Y)
    assert (fitted.scales > 0).all()
    assert any("scale of bad" in note for note in fitted.notes)
    assert fitted.weights[0].item() > 0.9


def test_scikit_learn_protocol():
    estimator = RobBoost(THREAT, kappa=0.3)
    assert estimator.get_params()["kappa"] == 0.3
    assert estimator.set_params(kappa=1.0, max_members=2).kappa == 1.0
    assert RobBoost(**estimator.get_params()).get_params() == estimator.get_params()
    assert "kappa=1.0" in repr(estimator)
    assert str(estimator) == repr(estimator)
    with pytest.raises(InputError, match="parameter 'depth'"):
        estimator.set_params(depth=3)


def test_progress_and_forms(bounds):
    import json

    told = []
    fitted = RobBoost(THREAT, bounds="ibp").fit(POOL, X, Y, progress=lambda *step: told.append(step))
    assert {what for what, _, _ in told} == {"bounds (ibp)", "weights"}
    assert all(done <= total for _, done, total in told)
    assert json.loads(json.dumps(fitted.to_dict()))["weights"] == fitted.weights.tolist()
    assert "proved at least" in str(fitted)
    assert fitted._repr_html_().startswith("<pre>")


def test_bad_input(bounds):
    other = nn.Sequential(nn.Flatten(), nn.Linear(36, 4)).eval()
    for members, x, y, message in [
        ([], X, Y, "pool is empty"),
        ([POOL[0], other], X, Y, "member 0 has 3 classes and member 1 4"),
        ({"a": POOL[0], "b": nn.Linear(5, 3)}, X, Y, "member b: model does not take"),
        (POOL, X, Y[:3], "60 images and 3 labels"),
        (POOL, X[:0], Y[:0], "at least one image"),
    ]:
        with pytest.raises(InputError, match=message):
            RobBoost(THREAT).fit(members, x, y)
    for options, message in [
        ({"kappa": 0}, "kappa=0"),
        ({"kappa": "big"}, "kappa='big'"),
        ({"max_members": 0}, "max_members=0"),
        ({"max_megabytes": -1}, "max_megabytes=-1"),
        ({"method": "magic"}, "method='magic'"),
    ]:
        with pytest.raises(InputError, match=message):
            RobBoost(THREAT, **options).fit_bounds(POOL, bounds)
    with pytest.raises(InputError, match="threat is a float"):
        RobBoost(0.1).fit(POOL, X, Y)
    with pytest.raises(InputError, match="bounds hold for"):
        RobBoost(Threat(0.5)).fit_bounds(POOL, bounds)
    with pytest.raises(InputError, match="pool has 2 members"):
        RobBoost(THREAT).fit_bounds(POOL[:2], bounds)


def test_pairs_that_every_member_settles_do_not_change_the_problem(bounds):
    from robboost.selection import Limits, Selection
    from robboost.weights import objective, solve

    scales = torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64)
    whole = bounds.problem(scales)
    for kappa in (0.01, 0.1):
        ours = Selection(bounds, scales, Limits((0.0,) * 3)).solve(kappa, "auto", everything=True)
        full = solve(whole.with_kappa(kappa))
        assert ours.n_pairs < whole.n_pairs
        assert ours.objective == pytest.approx(objective(whole.with_kappa(kappa), ours.weights), rel=1e-9)
        assert ours.objective == pytest.approx(full.objective, rel=3e-6)


def test_where_every_mix_is_safe_any_is_optimal():
    easy = RobBoost(Threat(0.001), bounds="ibp", kappa=1e-6).fit(
        POOL[:1] * 1 + [POOL[1]], *(part[:9] for part in (X, Y))
    )
    assert easy.solution.objective == 0
    assert easy.chosen.verified.count == 0
