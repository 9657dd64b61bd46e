"""robboost bounds and fit --store, as a user types them."""

import json
from pathlib import Path

import pytest

import robboost
from robboost.cli import main

POOL = str(Path(robboost.__file__).parent / "models" / "demo_pool")
ASKED = ["--data", "mnist-small", "--limit", "40", "--bounds", "ibp+crown-ibp"]


def _run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


def test_fill_fit_verify_repair(tmp_path, capsys):
    store = tmp_path / "bounds"
    fill = ["bounds", POOL, "--store", store, *ASKED, "--storage", "float16", "--memory", "50MB"]
    code, out, err = _run(capsys, "--profile", "--log", tmp_path / "log.jsonl", *fill, "--json")
    assert code == 0, err
    held = json.loads(out)
    assert held["pairs"] == 360
    assert held["missing"] == 0
    assert held["resources"]["peak_memory"] > 10**7
    for word in ("bounds", "rounding", "writing", "wall clock", "peak memory"):
        assert word in err
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events] == ["shard written"] * len(held["members"])
    assert events[0]["pairs"] == 360

    fit = ["fit", POOL, "--data", "mnist-small", "--limit", "40", "--kappa", "0.3", "--json"]
    code, out, err = _run(capsys, *fit, "--store", store, "--out", tmp_path / "a.safetensors")
    assert code == 0, err
    streamed = json.loads(out)
    code, out, err = _run(capsys, *fit, "--bounds", "ibp+crown-ibp", "--out", tmp_path / "b.safetensors")
    memory = json.loads(out)
    assert streamed["bounds"] == memory["bounds"] == "ibp+crown-ibp"
    assert streamed["chosen"] == memory["chosen"]
    assert streamed["solution"]["objective"] == pytest.approx(memory["solution"]["objective"], rel=1e-2)

    code, out, _ = _run(capsys, "bounds", "--store", store, "--verify")
    assert (code, "every checksum fits" in out) == (0, True)
    shard = store / "slopes" / "c" / "0" / "0" / "0"
    raw = bytearray(shard.read_bytes())
    raw[100] ^= 1
    shard.write_bytes(bytes(raw))
    code, _, err = _run(capsys, "bounds", "--store", store, "--verify")
    assert code == 2
    assert "checksum does not fit" in err
    code, out, _ = _run(capsys, "bounds", "--store", store, "--repair")
    assert (code, "removed:" in out) == (0, True)
    code, _, err = _run(capsys, *fit, "--store", store, "--out", tmp_path / "a.safetensors")
    assert code == 2
    assert "shards are missing" in err
    code, out, _ = _run(capsys, *fill)
    assert code == 0
    assert "of 360" not in out
    assert "float16" in out
    assert _run(capsys, "bounds", "--store", store, "--verify", "--json")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bounds", POOL], "--store is missing"),
        (["bounds", "--store", "x"], "no networks are named"),
        (["bounds", "--store", "nowhere", "--verify"], "no bound store here"),
        (["bounds", POOL, "--store", "x", *ASKED, "--memory", "lots"], "--memory lots"),
        (["bounds", POOL, "--store", "x", *ASKED, "--screen", "hard"], "--screen hard"),
        (["bounds", POOL, "--store", "x", *ASKED, "--storage", "int4"], "storage='int4'"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = _run(capsys, *arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
