"""`robboost boost`: what it writes, that it goes on where it was, and one line with exit code 2 for wrong input."""

import json
from pathlib import Path

import pytest

from robboost.cli import main

RECIPE = {
    "name": "tiny",
    "dataset": "mnist-small",
    "defaults": {"architecture": "conv 2 4x4/2, fc 8", "eps": 0.05, "epochs": 2, "batch": 50, "method": "ibp"},
    "members": [{"seed": 0}, {"seed": 1, "architecture": "fc 10"}],
}


def call(*arguments):
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return end.value.code


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(json.dumps(RECIPE))
    return ["boost", "tiny.json", "--out", "runs", "--limit", "150", "--device", "cpu"]


def test_two_stages_then_nothing_left_to_do(recipe, capsys):
    assert call(*recipe, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    folder = Path("runs/tiny")
    assert json.loads((folder / "boosting.json").read_text())["stages"] == found["stages"]
    assert [stage["epochs"] for stage in found["stages"]] == [2, 2]
    before = {file: file.stat().st_mtime_ns for file in folder.glob("stage-*.safetensors")}
    assert len(before) == 2
    # Every figure is a certificate: that of the file that was written.
    ensemble = ["certify", found["ensemble"], "--split", "heldout", "--limit", "150", "--json"]
    assert call(*ensemble) == 0
    certified = json.loads(capsys.readouterr().out)
    best = min(stage["verified_error"] for stage in found["stages"])
    assert certified["verified_error"]["value"] == pytest.approx(best)
    assert certified["threat"] == "linf 0.05 within [0, 1]"
    # The same command again trains nothing.
    assert call(*recipe) == 0
    text = capsys.readouterr().out
    assert "chosen: the first" in text
    assert {file: file.stat().st_mtime_ns for file in folder.glob("stage-*.safetensors")} == before


def test_options(recipe, capsys):
    assert call(*recipe, "--epochs", "3", "--minutes", "5", "--json") == 0
    assert [stage["epochs"] for stage in json.loads(capsys.readouterr().out)["stages"]] == [3, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"members": []}, "expected name, dataset, defaults and a list of members"),
        ({"dataset": "letters"}, "data set 'letters': expected one of"),
        ({"defaults": {"architecture": "fc 8", "method": "natural"}}, "method='natural': expected one of"),
        (
            {"defaults": {"architecture": "fc 8", "shift": 2}, "boosting": {"frozen": "stored"}},
            "shift and flip: expected neither",
        ),
        ({"boosting": {"reweight": "some"}}, "reweight='some': expected one of"),
        ({"defaults": {"architecture": "conv 2 1x1/28, conv 2 4x4/4", "batch": 50}}, "does not fit images"),
    ],
)
def test_wrong_recipes(recipe, change, message, capsys):
    Path("tiny.json").write_text(json.dumps(RECIPE | change))
    assert call(*recipe) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not list(Path().rglob("*.safetensors"))


def test_wrong_options(recipe, capsys):
    for wrong in (["boost", "nowhere", "--out", "runs"], [*recipe, "--limit", "0"], ["boost", "tiny.json"]):
        assert call(*wrong) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert call(*recipe, "--epochs", "1") == 0
    capsys.readouterr()
    Path("tiny.json").write_text(json.dumps(RECIPE | {"defaults": RECIPE["defaults"] | {"lr": 1e-3}}))
    assert call(*recipe) == 2  # the folder holds a run of another configuration
    assert "belongs to another configuration" in capsys.readouterr().err
