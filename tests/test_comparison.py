"""The table: its invariants, its choices on the fit images alone, its forms."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_pools import examples, pool

import robboost.combinations
import robboost.comparison
import robboost.mixtures
import robboost.rows
from robboost import InputError, SoundnessError, Threat, certify, compare
from robboost.attacks import AttackSettings
from robboost.combinations import vote_verdicts
from robboost.comparison import Settings
from robboost.intervals import Share
from robboost.models import demo_pool, load_model

POOL = {"wide": pool()[0], "<conv>": pool()[1], "uniform": pool()[2]}
FIT, TEST = examples(45, seed=21), examples(50, seed=22)
SETTINGS = Settings(bounds="ibp+crown", attack=AttackSettings(steps=10, restarts=1))


@pytest.fixture(scope="module", params=[("linf", 0.14), ("l2", 0.8), ("l1", 1.5)], ids=["linf", "l2", "l1"])
def result(request):
    norm, eps = request.param
    return compare(POOL, fit=FIT, test=TEST, threat=Threat(eps, norm, (0, 1)), settings=SETTINGS)


def test_certified_below_attacked_below_clean(result):
    proved = [row for row in result.rows if row.claim == "proved"]
    assert len(proved) >= 7
    for row in proved:
        assert row.verified.value >= row.attacked.value >= row.clean.value
        assert row.size_mb > 0
        if row.name != "weighted voting":  # which has no margins
            assert row.targeted <= row.verified.value + 1e-12
    assert result.row("cascade").attacked.value >= result.row("cascade").clean.value


def test_a_wrong_certificate_is_loud(tmp_path, monkeypatch):
    """Bounds that promise too much: the attack finds out, and says of which row, bounds and mix."""
    monkeypatch.chdir(tmp_path)
    real = robboost.mixtures.margin_bounds

    def boastful(model, x, y, threat, *arguments, **keywords):
        # What holds next to the image, claimed for the whole set.
        found = real(model, x, y, replace_eps(threat), *arguments, **keywords)
        return replace(found, slope=torch.zeros_like(found.slope), intercept=found.lower)

    def replace_eps(threat):
        return Threat(1e-6, threat.norm, threat.clip)

    monkeypatch.setattr(robboost.mixtures, "margin_bounds", boastful)
    with pytest.raises(SoundnessError, match=r"^member .*, bounds crown, weight .*example\(s\) fooled"):
        compare(POOL, fit=FIT, test=TEST, threat=Threat(0.14, clip=(0, 1)), settings=replace(SETTINGS, bounds="crown"))
    (points,) = tmp_path.glob("*.npz")
    assert points.with_suffix(".safetensors").exists()


def test_a_wrong_certificate_of_the_vote_is_loud(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(robboost.rows, "vote_certified", lambda margins, *_: torch.ones(margins.shape[1]).bool())
    settings = Settings("ibp", attack=AttackSettings(2, 1), cascade=False)
    with pytest.raises(SoundnessError, match=r"^weighted voting: test image \d+ is certified and wrong"):
        compare(POOL, fit=FIT, test=TEST, threat=Threat(0.4, clip=(0, 1)), settings=settings)
    # From the files alone: in the set of the image, and there the vote is wrong.
    (file,) = tmp_path.glob("*.npz")
    saved, voters = np.load(file), load_model(file.with_suffix(".safetensors"))
    about, point, image = json.loads(str(saved["about"])), *(torch.from_numpy(saved[k]) for k in ("point", "image"))
    label = torch.from_numpy(saved["label"])
    assert torch.equal(image, TEST[0][saved["index"]])
    assert Threat(0.4, clip=(0, 1)).contains(point, image.double(), tolerance=1e-12).all()
    weights = torch.tensor(about["weights"])
    assert vote_verdicts(list(voters.members), weights, point, label, []).clean.all()


def test_the_cascade_asks_the_best_member_first(monkeypatch):
    asked = []

    class Noted(robboost.combinations.Cascade):
        def __init__(self, pool, *arguments, **keywords):
            asked.extend(pool)
            super().__init__(pool, *arguments, **keywords)

    monkeypatch.setattr(robboost.comparison, "Cascade", Noted)
    result = compare(POOL, fit=FIT, test=TEST, threat=Threat(0.05), settings=Settings("ibp", attack=None))
    order = [next(name for name, member in POOL.items() if member is one) for one in asked]
    errors = [result.row(f"member {name}").verified_fit.count for name in order]
    assert errors == sorted(errors)
    assert errors[0] < errors[-1]


def test_order_between_rows(result):
    some, every = result.row("some member certifies"), result.row("all members certify")
    for row in result.rows:
        if row.name.startswith("member"):
            assert some.verified.count <= row.verified.count <= every.verified.count
    assert result.row("cascade").claim == "UNSOUND"
    assert result.row("weighted voting").claim == "proved"
    assert any(row.name == "RobBoost (coordinate descent)" for row in result.rows) is (
        result.fitted.threat.norm == "linf"
    )


def test_figures_equal_the_certificate_of_the_ensemble(result):
    certificate = certify(result.fitted.ensemble, *TEST, result.fitted.threat, method="ibp+crown")
    row = result.row("RobBoost")
    assert row.verified.count == int((~certificate.certified).sum())
    assert row.clean.count == int((~certificate.correct).sum())
    assert row.targeted == pytest.approx(certificate.targeted_verified_error)
    torch.testing.assert_close(result.margins["RobBoost"], certificate.margins.amin(1))
    on_fit = certify(result.fitted.ensemble, *FIT, result.fitted.threat, method="ibp+crown")
    assert row.verified_fit == Share(int((~on_fit.certified).sum()), len(FIT[1]))


def test_best_single_is_chosen_on_the_fit_images(result):
    members = [row for row in result.rows if row.name.startswith("member")]
    best = min(members, key=lambda row: row.verified_fit.count)
    top = result.rows[0]
    assert top.name.startswith("best single")
    assert (top.verified_fit, top.verified) == (best.verified_fit, best.verified)


def test_overlap_and_tests(result):
    members = [row for row in result.rows if row.name.startswith("member")]
    assert [1 - row.verified.value for row in members] == pytest.approx(result.overlap.diagonal().tolist())
    assert torch.equal(result.overlap, result.overlap.T)
    test = result.tests["RobBoost against uniform"]
    uniform, ours = result.row("uniform").verified.count, result.row("RobBoost").verified.count
    assert test.difference == uniform - ours


def test_forms(result):
    values = json.loads(json.dumps(result.to_dict()))
    assert len(values["rows"]) == len(result.rows)
    assert result.to_pandas().loc["RobBoost", "verified error"] == 100 * result.row("RobBoost").verified.value
    assert json.loads(result.to_json())["rows"] == values["rows"]
    arrays = result.to_numpy()
    assert arrays["overlap"].shape == (3, 3)
    assert (arrays["margins RobBoost"] > 0).sum() == len(TEST[1]) - result.row("RobBoost").verified.count
    text, page = str(result), result._repr_html_()
    assert "RobBoost against uniform" in text
    assert "member <conv>" in text
    assert f"  {100 * float(result.overlap[0, 2]):.1f}" in text.splitlines()[-3]
    assert "&lt;conv&gt;" in page
    assert "<conv>" not in page
    with pytest.raises(InputError, match="row 'x'"):
        result.row("x")


def test_invariants_on_the_pool_that_ships_with_the_package():
    held, test = (robboost.load_dataset("mnist-small", split=split).take(24) for split in ("heldout", "test"))
    settings = Settings("ibp", attack=AttackSettings(4, 1), cascade=False)
    result = compare(demo_pool(), fit=(held.images, held.labels), test=(test.images, test.labels),
                     threat=Threat(0.1, clip=(0, 1)), settings=settings)  # fmt: skip
    networks = [row for row in result.rows if row.claim == "proved"]
    assert len(networks) == 10
    for row in networks:
        assert row.verified.value >= row.attacked.value >= row.clean.value, row.name


def test_without_attack_and_cascade():
    plain = compare(POOL, fit=FIT, test=TEST, threat=Threat(0.05), settings=Settings("ibp", attack=None, cascade=False))
    assert all(row.attacked is None for row in plain.rows)
    assert all(row.name != "cascade" for row in plain.rows)


def test_bad_input():
    threat = Threat(0.05)
    with pytest.raises(InputError, match="for all rows alike"):
        compare(POOL, fit=FIT, test=TEST, threat=threat, settings=Settings(robboost={"bounds": "ibp"}))
    with pytest.raises(InputError, match="member wide: model does not take"):
        compare(POOL, fit=FIT, test=(TEST[0][:, :, :3], TEST[1]), threat=threat)
    with pytest.raises(InputError, match="member wide: labels reach"):
        compare(POOL, fit=(FIT[0], FIT[1] + 9), test=TEST, threat=threat)
