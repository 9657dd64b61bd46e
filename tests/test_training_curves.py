"""The log of a run as a figure: every member a line, estimates dashed, files that are no logs named."""

import json

import pytest

from robboost.errors import InputError
from robboost.report.figures import to_svg
from robboost.report.training_curves import read_logs, training_curves


def entries(losses, **more):
    return [{"epoch": n + 1, "loss": loss, "robust": 0.1 * n, "eps": 0.01 * n, **more} for n, loss in enumerate(losses)]


def write(folder, name, rows):
    (folder / f"{name}.log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_member_is_a_line(tmp_path):
    write(tmp_path, "one", entries([3.0, 2.0, 1.5]))
    write(tmp_path, "two", entries([3.0, 2.5], estimated_from=31))
    write(tmp_path, "none", [])
    assert list(read_logs(tmp_path)) == ["one", "two"]
    loss, robust, eps = training_curves(tmp_path).axes
    assert [list(line.get_ydata()) for line in loss.lines] == [[3.0, 2.0, 1.5], [3.0, 2.5]]
    assert [line.get_linestyle() for line in robust.lines] == ["-", "--"]
    assert [line.get_linestyle() for line in eps.lines] == ["-", "-"]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["one", "two"]
    assert "two" in to_svg(training_curves(tmp_path))


def test_wrong_logs_are_named(tmp_path):
    with pytest.raises(InputError, match="no log of an epoch"):
        training_curves(tmp_path)
    for text in ("no json\n", '{"epoch": 1}\n', "[1]\n", "3\n"):
        (tmp_path / "bad.log.jsonl").write_text(text)
        with pytest.raises(InputError, match=r"bad\.log\.jsonl"):
            training_curves(tmp_path)
