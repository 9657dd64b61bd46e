"""Pools that ship: rounded first, then measured; what the folder says, and that `certify` says the same of it."""

import json

import pytest
import torch
from small_pools import SHAPE
from small_runs import quick, trained_run

import robboost.reproduce.zoo as zoo
from robboost.certification import certify
from robboost.cli import main
from robboost.data import load_dataset
from robboost.errors import CheckpointError, InputError
from robboost.fitting import RobBoost
from robboost.models import read_mix, read_pool, save_model
from robboost.models.pools import parameter_digest
from robboost.reproduce import reproduce
from robboost.reproduce.loading import threat_of


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo-tool")
    run = trained_run(folder)
    outcome = reproduce("zoo", [run], quick(folder))
    return folder, run, outcome


def test_every_weight_is_a_float16_value_and_was_one_when_measured(made):
    folder, run, outcome = made
    shipped, trained = read_pool(folder / "zoo" / "mnist-0.3"), read_pool(run)
    for before, after in zip(trained.models, shipped.models, strict=True):
        for exact, value in zip(before.parameters(), after.parameters(), strict=True):
            assert torch.equal(value, exact.half().float())
            assert not torch.equal(value, exact)
    figures = outcome.values["pools"]["mnist-0.3"]
    assert figures["hashes"] == [parameter_digest(model) for model in shipped.models]
    files = list((folder / "zoo" / "mnist-0.3").glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) < sum(f.stat().st_size for f in run.glob("*.safetensors"))


def test_the_manifest_holds_configuration_seed_hash_figures_and_mix(made):
    folder, _, outcome = made
    stated = json.loads((folder / "zoo" / "mnist-0.3" / "manifest.json").read_text())
    figures = outcome.values["pools"]["mnist-0.3"]
    for n, member in enumerate(stated["members"]):
        assert len(member["sha256"]) == 64
        assert (member["seed"], member["config"]["method"]) == (n, "ibp")
        assert member["metrics"]["verified_error"] == figures["rows"][member["name"]]["verified_test"]["value"]
    notes = stated["notes"]
    assert notes["threat"] == {"eps": 0.05, "norm": "linf", "clip": [0.0, 1.0]}
    assert notes["published"]["not_certified"] == figures["rows"]["RobBoost"]["verified_test"]["count"]
    assert sum(notes["ensemble"]["weights"]) == pytest.approx(1)
    assert all(weight > 0 for weight in notes["ensemble"]["weights"])
    assert json.loads((folder / "zoo" / "mnist-0.3" / "results.json").read_text()) == figures
    assert not list((folder / "zoo").glob(".*"))


def test_certify_gives_the_published_figure_again(made, capsys):
    folder, _, outcome = made
    with pytest.raises(SystemExit) as end:
        main(["certify", str(folder / "zoo" / "mnist-0.3"), "--data", str(folder / "images.npz"), "--json"])
    assert end.value.code == 0
    found = json.loads(capsys.readouterr().out)
    figures = outcome.values["pools"]["mnist-0.3"]
    assert found["verified_error"] == figures["rows"]["RobBoost"]["verified_test"]
    assert found["clean_error"] == figures["rows"]["RobBoost"]["clean"]
    assert found["method"] == figures["bounds"] == "ibp+crown-ibp"
    assert found["published"]["not_certified"] == found["verified_error"]["count"]
    with pytest.raises(SystemExit):
        main(["certify", str(folder / "zoo" / "mnist-0.3"), "--data", str(folder / "images.npz"), "--bounds", "ibp"])
    text = capsys.readouterr().out
    assert "bounds                    ibp, float32" in text
    assert f"published                 {found['published']['not_certified']} of 48 test images" in text


def test_the_summary_ends_the_output(made):
    text = made[2].text
    assert "RobBoost against best single" in text
    assert text.splitlines()[-1].endswith("MiB) in all")


def test_only_members_that_are_used_ship(made, tmp_path):
    _, run, _ = made
    request = quick(run.parent, out=tmp_path, members="used", work=tmp_path / "work")
    figures = reproduce("zoo", [run], request).values["pools"]["mnist-0.3"]
    shipped = read_mix(tmp_path / "mnist-0.3")
    used = {name for name, weight in zip(figures["names"], figures["weights"], strict=True) if weight > 0}
    assert set(shipped.pool.names) == used | {figures["best_single"]}
    assert set(shipped.ensemble.names) == used
    assert shipped.notes["trained_members"] == 3
    test = load_dataset(str(run.parent / "images.npz"), split="test")
    certificate = certify(shipped.ensemble, test.images, test.labels, threat_of(shipped.pool), method="ibp+crown-ibp")
    assert int((~certificate.certified).sum()) == figures["rows"]["RobBoost"]["verified_test"]["count"]


def test_an_ensemble_file_becomes_a_pool(made, tmp_path):
    folder, run, _ = made
    pool = read_pool(run)
    data = load_dataset(str(folder / "images.npz"), split="heldout")
    fitted = RobBoost(threat_of(pool), bounds="ibp").fit(pool, data.images, data.labels)
    notes = {"dataset": "mnist", "threat": {"eps": 0.05}}
    save_model(fitted.ensemble, tmp_path / "boosted.safetensors", notes, input_shape=SHAPE)
    request = quick(folder, out=tmp_path / "zoo", bounds="ibp", steps=0)
    made = reproduce("zoo", [tmp_path / "boosted.safetensors"], request).values["pools"]
    assert made["boosted"]["names"] == list(fitted.ensemble.names)
    assert read_mix(tmp_path / "zoo" / "boosted").notes["bounds"] == "ibp"
    save_model(pool.models[0], tmp_path / "one.safetensors", notes, input_shape=SHAPE)
    request = quick(folder, out=tmp_path / "zoo", steps=0, eps="0.05")
    assert reproduce("zoo", [tmp_path / "one.safetensors"], request).values["pools"]["one"]["names"] == ["one"]


def test_a_zoo_too_large_leaves_what_is_there(made, monkeypatch):
    folder, run, _ = made
    before = {f.name: f.read_bytes() for f in (folder / "zoo" / "mnist-0.3").iterdir()}
    monkeypatch.setattr(zoo, "LIMIT_BYTES", 1000)
    with pytest.raises(InputError, match=r"bytes with mnist-0\.3, expected at most 1000 for the whole zoo"):
        reproduce("zoo", [run], quick(folder))
    assert {f.name: f.read_bytes() for f in (folder / "zoo" / "mnist-0.3").iterdir()} == before
    assert not list((folder / "zoo").glob(".*"))


def test_what_the_tool_refuses(made):
    folder, run, _ = made
    with pytest.raises(InputError, match="zoo: no run is named"):
        reproduce("zoo", [], quick(folder))
    with pytest.raises(InputError, match="--members 'some': expected all or used"):
        reproduce("zoo", [run], quick(folder, members="some"))
    with pytest.raises(CheckpointError, match="missing"):
        reproduce("zoo", [folder / "nothing"], quick(folder))


@pytest.mark.parametrize(
    ("ensemble", "message"),
    [
        (None, "names no mix of the pool"),
        ({"members": ["m9"], "weights": [1.0], "scales": [1.0]}, r"the mix names \['m9'\]; expected members"),
        ({"members": "m0", "weights": [1.0], "scales": [1.0]}, "the mix names 'm0'"),
        ({"members": ["m0"], "weights": [0.5], "scales": [1.0]}, "weights sum to 0.5"),
        ({"members": ["m0"], "weights": [1.0], "scales": [-1.0]}, "scales has lowest value -1"),
        ({"members": ["m0"]}, "weights has shape"),
    ],
)
def test_a_manifest_without_a_sound_mix(ensemble, message, tmp_path):
    run = trained_run(tmp_path)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["notes"]["ensemble"] = ensemble
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message):
        read_mix(run)


def test_a_changed_file_is_noticed(made, tmp_path):
    folder, _, _ = made
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (folder / "zoo" / "mnist-0.3").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert zoo.read_results(copy, read_pool(copy)) is not None
    content = bytearray((copy / "m1.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "m1.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m1\.safetensors: SHA-256 is"):
        read_mix(copy)


def test_results_of_other_networks_are_not_read(made):
    folder, run, _ = made
    assert zoo.read_results(folder / "zoo" / "mnist-0.3", read_pool(run)) is None  # before they were rounded
    assert zoo.read_results(run, read_pool(run)) is None
