"""Runs that were cut off: every step is taken up again, nothing else is, and no journal stops a run."""

import numpy as np
import pytest
import torch
from safetensors import safe_open
from small_pools import examples, pool

import robboost.journal as journals
import robboost.mixtures as mixtures
from robboost import SoundnessError, Threat, compare
from robboost.attacks import AttackSettings
from robboost.comparison import Settings
from robboost.journal import remembered, resumable

POOL = pool()
IDENTITY = {"command": "test", "data": "abc"}


class StoppedError(Exception):
    pass


def run(folder, calls, until, identity=IDENTITY):
    with resumable(identity, folder=folder) as journal:
        values = []
        for n in range(5):
            if n == until:
                raise StoppedError

            def work(n=n):
                calls.append(n)
                return {"n": torch.tensor([n]), "mask": torch.zeros(0, dtype=torch.bool)}

            values.append(int(remembered(f"step {n}", work)["n"]))
    return values, journal


def test_steps_are_taken_up_where_they_stopped(tmp_path):
    calls = []
    with pytest.raises(StoppedError):
        run(tmp_path, calls, until=3)
    values, journal = run(tmp_path, calls, until=None)
    assert values == calls == [0, 1, 2, 3, 4]
    assert (journal.before, journal.reused) == (3, 3)
    assert not list(tmp_path.iterdir())  # done: nothing is kept


def test_another_run_starts_afresh(tmp_path):
    calls = []
    with pytest.raises(StoppedError):
        run(tmp_path, calls, until=2)
    run(tmp_path, calls, until=None, identity={**IDENTITY, "data": "def"})
    assert calls == [0, 1, 0, 1, 2, 3, 4]


def test_a_damaged_step_is_computed_again(tmp_path):
    calls = []
    with pytest.raises(StoppedError):
        run(tmp_path, calls, until=3)
    first, second, _ = sorted(tmp_path.rglob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:20])
    second.write_bytes(first.read_bytes() + b"x" * 100)
    assert run(tmp_path, calls, until=None)[0] == [0, 1, 2, 3, 4]
    assert calls == [0, 1, 2, 0, 1, 3, 4]


def test_a_flipped_bit_is_seen(tmp_path):
    calls = []
    with pytest.raises(StoppedError):
        run(tmp_path, calls, until=3)
    path = sorted(tmp_path.glob("*/*.safetensors"))[1]
    content = bytearray(path.read_bytes())
    content[-8] ^= 4  # the step's number: 1 becomes 5, and the file is as readable as before
    path.write_bytes(content)
    values, journal = run(tmp_path, calls, until=None)
    assert values == [0, 1, 2, 3, 4]
    assert journal.reused == 2


def test_a_step_within_a_step_is_part_of_it(tmp_path):
    def stopped():
        with resumable(IDENTITY, folder=tmp_path):
            remembered("outer", lambda: remembered("inner", lambda: {"n": torch.ones(1)}))
            raise StoppedError

    with pytest.raises(StoppedError):
        stopped()
    (only,) = tmp_path.rglob("*.safetensors")
    with safe_open(only, "pt") as opened:
        assert opened.metadata()["step"] == "outer"


def test_no_place_no_space_and_a_contradiction(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    calls = []
    assert run(tmp_path / "file" / "below", calls, until=None)[0] == [0, 1, 2, 3, 4]  # a file is no folder
    monkeypatch.setattr(journals, "_MOST_BYTES", 8)  # room for the first step alone
    with pytest.raises(StoppedError):
        run(tmp_path, calls, until=4)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    assert not list(tmp_path.rglob("*.part"))
    with pytest.raises(SoundnessError), resumable(IDENTITY, folder=tmp_path):
        raise SoundnessError("a proof was broken")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_was_never_continued_is_forgotten(tmp_path):
    import os

    old = tmp_path / "old"
    old.mkdir()
    os.utime(old, (0, 0))
    run(tmp_path, [], until=None)
    assert not old.exists()


def test_a_comparison_goes_on_and_is_the_same(tmp_path, monkeypatch):
    """Cut off at every margin bound in turn: the bounds before it are not computed again."""
    fit, test = examples(12, 51), examples(12, 52)
    settings = Settings("ibp", attack=AttackSettings(3, 1), cascade=True)
    plain = compare(POOL, fit=fit, test=test, threat=Threat(0.1), settings=settings)
    real, counted = mixtures.margin_bounds, []
    limit = [0]

    def counting(*arguments, **keywords):
        if len(counted) >= limit[0]:
            raise KeyboardInterrupt
        counted.append(1)
        return real(*arguments, **keywords)

    monkeypatch.setattr(mixtures, "margin_bounds", counting)
    done, tries = None, 0
    while done is None:
        tries += 1
        counted.clear()
        limit[0] = 3  # enough for the longest single step, and far from enough for all of them
        if tries > 6:
            limit[0] = 100
        try:
            with resumable(IDENTITY, folder=tmp_path):
                done = compare(POOL, fit=fit, test=test, threat=Threat(0.1), settings=settings)
        except KeyboardInterrupt:
            assert tries < 8
    assert tries > 2
    assert len(counted) < 50
    values, expected = done.to_dict(), plain.to_dict()
    for result in (values, expected):
        del result["robboost"]["solution"]["seconds"], result["robboost"]["solution"]["history"]
    assert values == expected
    for name in plain.margins:
        np.testing.assert_array_equal(done.margins[name], plain.margins[name])
