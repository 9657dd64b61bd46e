"""The entry and what it measures: rows are `certify`'s, the paired test McNemar's, rivals what they are called."""

import json
from pathlib import Path

import pytest
import torch

import robboost as rb
from robboost.data import Dataset
from robboost.errors import InputError
from robboost.intervals import paired_test
from robboost.models import demo_pool, save_model
from robboost.models.architectures import build
from robboost.training import boosting as boosting_module
from robboost.training.boosting_member import BoostedMember
from robboost.training.boosting_results import against, measure, table
from robboost.training.boosting_rivals import all_alive, rivals
from robboost.training.boosting_run import main

METHOD = "ibp+crown-ibp"
THREAT = rb.Threat(0.02, clip=(0, 1))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool() -> dict[str, torch.nn.Module]:
    return dict(zip("abc", demo_pool().models[:3], strict=True))


@pytest.fixture(scope="module")
def few() -> Dataset:
    return rb.load_dataset("mnist-small", split="test").take(60)


def test_rows_are_the_certificates_of_the_ensembles(pool, few: Dataset) -> None:
    a, b, c = pool.values()
    ensembles = {
        "pair": rb.Ensemble([a, b], [0.3, 0.7], [2.0, 1.0]),
        "other": rb.Ensemble([b, c], [1.0, 0.0]),
        "same twice": rb.Ensemble([c, c], [0.5, 0.5]),
    }
    rows = measure(ensembles, few, THREAT, METHOD, CPU)
    for row, ensemble in zip(rows, ensembles.values(), strict=True):
        found = rb.certify(ensemble, few.images, few.labels, THREAT, method=METHOD)
        assert torch.equal(row.certified, found.certified)
        assert torch.equal(row.correct, found.correct)
    assert [row.members for row in rows] == [2, 1, 1]
    assert rows[0].size_mb == pytest.approx(ensembles["pair"].size_mb)
    tests = against(rows, "pair")
    assert tests["other"] == paired_test(~rows[0].certified, ~rows[1].certified)
    assert rows[0].to_dict()["failed"] == (~rows[0].certified).nonzero()[:, 0].tolist()
    lines = table(rows, "pair").splitlines()
    assert lines[1].endswith("*")
    assert lines[2].endswith(f"{tests['other'].difference:+d} images, p = {tests['other'].p_value:.2g}")
    with pytest.raises(InputError, match="ensembles"):
        measure({}, few, THREAT, METHOD, CPU)


def test_rivals_are_mixes_of_the_members_with_their_own_figures(pool, few: Dataset) -> None:
    found = rivals(pool, few, THREAT, METHOD, CPU)
    for rival in found:
        expected = rb.certify(rival.ensemble, few.images, few.labels, THREAT, method=METHOD)
        assert rival.verified_error == pytest.approx(expected.verified_error, abs=1e-12)
        assert rival.clean_error == pytest.approx(expected.clean_error, abs=1e-12)
    singles = [rb.certify(m, few.images, few.labels, THREAT, method=METHOD).verified_error for m in pool.values()]
    assert found.best.verified_error == pytest.approx(min(singles))
    assert found.average.ensemble.weights.tolist() == pytest.approx([1 / 3] * 3)
    alive = all_alive(found)
    assert alive.names == ("a", "b", "c")
    assert (alive.coefficients() > 0).all()
    dropped = found._replace(fitted=found.best)
    halfway = all_alive(dropped).coefficients()
    plain = found.average.ensemble.coefficients()
    own = torch.tensor([name in found.best.ensemble.names for name in "abc"], dtype=torch.float64)
    assert torch.allclose(halfway, (own + plain / plain.sum()) / 2)


RECIPE = """
name = "tiny"
dataset = "mnist-small"
[defaults]
eps = 0.05
method = "crown-ibp"
crown_share = 1.0
epochs = 1
batch = 60
lr = 4e-3
warmup = 0.1
architecture = "conv 4 4x4/2, fc 16"
[[members]]
seed = 0
[[members]]
seed = 1
"""


def test_the_three_runs_end_with_a_table_of_the_test_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(RECIPE)
    out = tmp_path / "out"
    common = [str(recipe), "--out", str(out), "--device", "cpu", "--limit", "120", "--measured", "120"]
    test = rb.load_dataset("mnist-small", split="test").take(120)
    threat = rb.Threat(0.05, clip=(0, 1))

    def certified(file: Path) -> list[int]:
        found = rb.certify(rb.load_model(file), test.images, test.labels, threat, method=METHOD)
        return (~found.certified).nonzero()[:, 0].tolist()

    assert main(common) == 0
    boosted = json.loads((out / "tiny/boosted.json").read_text())
    assert [row["name"] for row in boosted["test"]][:2] == ["1 stages (+ 1-net)", "2 stages (+ 2-net)"]
    for number, row in enumerate(boosted["test"][:2], start=1):
        assert row["failed"] == certified(out / f"tiny/stage-{number}.safetensors")
        assert row["verified_error"]["total"] == 120
    assert boosted["test"][2]["failed"] == certified(out / "tiny/boosted-fitted.safetensors")
    assert len(boosted["boosting"]["stages"]) == 2
    assert "1-net" in capsys.readouterr().out

    first = str(out / "tiny/boosted.safetensors")
    assert main([*common, "--alone", "--against", first]) == 0
    alone = json.loads((out / "tiny/alone.json").read_text())
    assert alone["test"][0]["failed"] == certified(out / "tiny/alone.safetensors")
    assert alone["test"][-1]["name"] == first
    assert alone["test"][-1]["failed"] == next(r for r in boosted["test"] if r["name"] == boosted["chosen"])["failed"]
    assert set(alone["paired"]) == {row["name"] for row in alone["test"][1:]}

    assert main([*common, "--tune", str(out / "tiny/alone-average.safetensors"), "--lr", "1e-3"]) == 0
    tuned = json.loads((out / "tiny/tuned-alone-average.json").read_text())
    assert tuned["lr"] == 1e-3
    assert tuned["test"][0]["failed"] == certified(out / "tiny/tuned-alone-average.safetensors")
    assert tuned["test"][1]["failed"] == alone["test"][0]["failed"]
    assert tuned["tuning"]["errors"][tuned["tuning"]["chosen"]]["verified_error"] <= min(
        entry["verified_error"] for entry in tuned["tuning"]["errors"].values()
    )
    assert "more certified by *" in capsys.readouterr().out


def test_wrong_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-recipe", "--out", str(tmp_path)]) == 2
    assert "no-such-recipe" in capsys.readouterr().err
    assert main(["mnist-0.3", "--out", str(tmp_path), "--against", str(tmp_path / "none.safetensors")]) == 2
    assert "none.safetensors" in capsys.readouterr().err


def test_a_stage_that_diverges_leaves_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Lost(BoostedMember):
        def loss(self, situation):
            loss, margins = super().loss(situation)
            return (loss if self.frozen is None else loss * torch.inf), margins

    monkeypatch.setattr(boosting_module, "BoostedMember", Lost)
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(RECIPE)
    assert main([str(recipe), "--out", str(tmp_path), "--device", "cpu", "--limit", "60", "--measured", "60"]) == 0
    found = json.loads((tmp_path / "tiny/boosted.json").read_text())
    assert "2-net: the loss was not finite" in found["diverged"]
    assert [row["name"] for row in found["test"]] == ["1 stages (+ 1-net)"]
    assert "verified error" in capsys.readouterr().out


def test_a_pool_of_members_with_weight_zero_is_measured_without_them(pool, few: Dataset, tmp_path: Path) -> None:
    lone = rb.Ensemble(list(pool.values()), [0.0, 1.0, 0.0])
    save_model(lone, tmp_path / "lone.safetensors", input_shape=(1, 28, 28))
    again = rb.load_model(tmp_path / "lone.safetensors")
    (row,) = measure({"lone": again}, few, THREAT, METHOD, CPU)
    assert row.members == 1
    assert row.size_mb == pytest.approx(rb.Ensemble([list(pool.values())[1]], [1.0]).size_mb)


def test_more_than_one_structure_of_members_is_fine(few: Dataset) -> None:
    mixed = rb.Ensemble([build("fc 5", (1, 28, 28), seed=0), build("A", (1, 28, 28), seed=0)], [0.5, 0.5])
    (row,) = measure({"mixed": mixed}, few, THREAT, METHOD, CPU)
    assert len(row.certified) == 60
