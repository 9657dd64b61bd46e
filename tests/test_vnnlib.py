"""VNN-LIB properties: the text by hand, the interval against the threat by sampling, other writers, bad input."""

import pytest
import torch

from robboost.errors import DataError, InputError
from robboost.exchange import read_property, write_properties
from robboost.threat import Threat

SHAPE = (2, 3, 3)


def images(count=4, dtype=torch.float32):
    x = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=dtype)
    x[0, 0, 0] = 0.0
    x[1, 0, 0] = 1.0
    return x, torch.arange(count) % 3


def test_text_by_hand(tmp_path):
    (path,) = write_properties(
        tmp_path, torch.tensor([[0.5, 0.0]]), torch.tensor([1]), Threat(0.25, clip=(0, 1)), num_classes=3, timeout_s=60
    )
    lines = path.read_text().splitlines()
    assert lines[0] == "; image 0 of class 1, linf 0.25 within [0, 1]"
    assert [line for line in lines if not line.startswith(";") and line] == [
        "(declare-const X_0 Real)",
        "(declare-const X_1 Real)",
        "(declare-const Y_0 Real)",
        "(declare-const Y_1 Real)",
        "(declare-const Y_2 Real)",
        "(assert (>= X_0 0.24999999999999997))",
        "(assert (<= X_0 0.7500000000000001))",
        "(assert (>= X_1 0.0))",
        "(assert (<= X_1 0.25000000000000006))",
        "(assert (or",
        "    (and (>= Y_0 Y_1))",
        "    (and (>= Y_2 Y_1))",
        "))",
    ]
    assert (tmp_path / "instances.csv").read_text() == "network.onnx,properties/image_00000.vnnlib,60\n"


@pytest.mark.parametrize(
    "threat", [Threat("2/255"), Threat(0.1, clip=(0, 1)), Threat(1e-9, clip=(0, 1)), Threat(0.0)], ids=str
)
def test_interval_is_the_threat(threat, tmp_path):
    """Every sampled and extreme point lies inside, and the extreme points reach both ends."""
    x, y = images()
    files = write_properties(tmp_path, x, y, threat, num_classes=4)
    found = [read_property(file) for file in files]
    lower, upper = (torch.stack([getattr(entry, end) for entry in found]).view(x.shape) for end in ("lower", "upper"))
    generator = torch.Generator().manual_seed(0)
    reached = [torch.full(x.shape, sign * float("inf"), dtype=torch.float64) for sign in (1, -1)]
    for _ in range(40):
        for point in (
            threat.sample(x.double(), generator=generator),
            threat.extreme_points(x.double(), generator=generator),
        ):
            assert ((point >= lower) & (point <= upper)).all()
            reached = [torch.minimum(reached[0], point), torch.maximum(reached[1], point)]
    assert (reached[0] - lower).abs().max() < 1e-15
    assert (upper - reached[1]).abs().max() < 1e-15
    assert [(entry.label, entry.targets, entry.num_classes) for entry in found] == [
        (0, (1, 2, 3), 4), (1, (0, 2, 3), 4), (2, (0, 1, 3), 4), (0, (1, 2, 3), 4)
    ]  # fmt: skip


def test_one_line_for_each_image(tmp_path):
    x, y = images()
    files = write_properties(tmp_path, x, y, Threat(0.1), num_classes=3, network="nets/e.onnx")
    lines = (tmp_path / "instances.csv").read_text().splitlines()
    assert lines == [f"nets/e.onnx,properties/{file.name},300" for file in files]
    assert all((tmp_path / line.split(",")[1]).is_file() for line in lines)


HEAD = "(declare-const X_0 Real)(declare-const Y_0 Real)(declare-const Y_1 Real)(declare-const Y_2 Real)"
ENDS = "(assert (<= X_0 2e-1)) (assert (>= X_0 -1.5)) ; both\n"


@pytest.mark.parametrize(
    ("statement", "targets"),
    [
        ("(assert (>= Y_0 Y_1))", (0,)),
        ("(assert (<= Y_1 Y_0))", (0,)),
        ("(assert (or (>= Y_0 Y_1) (<= Y_1 Y_2)))", (0, 2)),
        ("(assert (or\n (and (>= Y_0 Y_1)) ; first\n (and (>= Y_2 Y_1)) ))", (0, 2)),
    ],
)
def test_forms_of_other_writers(statement, targets, tmp_path):
    (tmp_path / "p.vnnlib").write_text(f"; comment (\n{HEAD}\n{ENDS}{statement}\n")
    found = read_property(tmp_path / "p.vnnlib")
    assert (found.label, found.targets) == (1, targets)
    assert (found.lower.tolist(), found.upper.tolist()) == ([-1.5], [0.2])


GOOD = f"{HEAD}{ENDS}(assert (>= Y_0 Y_1))"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (";", "inputs without bounds"),
        ("(", "does not end"),
        (")", "outside a statement"),
        ("X_0", "outside a statement"),
        ("()", "an empty list"),
        ("(" * 5000, "nested too deep"),
        ("(check-sat)", "statement"),
        ("(declare-const X_1 Real)", "declaration"),
        ("(declare-const Z_0 Real)", "no variable"),
        ("(declare-const X_0 Int)", "declaration"),
        ("(declare-const X_99999999 Real)", "declaration"),
        (f"{HEAD}(assert (>= Y_0 Y_1))", "inputs without bounds"),
        (f"{HEAD}{ENDS}", "no statement on the outputs"),
        (GOOD + "(assert (>= Y_0 Y_1))", "more than one statement"),
        (GOOD + ENDS, "bounded twice"),
        (GOOD.replace("Y_1))", "Y_7))"), "not declared"),
        (GOOD.replace("-1.5", "1.5"), "a lower bound above"),
        (GOOD.replace("-1.5", "nan"), "bound 'nan'"),
        (GOOD.replace("-1.5", "1e999"), "bound '1e999'"),
        (GOOD.replace("-1.5", "(- 1.5)"), "bound"),
        (GOOD.replace(">= Y_0 Y_1", ">= Y_0 0.5"), "no variable"),
        (GOOD.replace(">= Y_0 Y_1", ">= Y_0 X_0"), "alternative"),
        (GOOD.replace(">= Y_0 Y_1", ">= Y_1 Y_1"), "not compared with one label"),
        (GOOD.replace("(>= Y_0 Y_1)", "(or (>= Y_0 Y_1) (>= Y_1 Y_0))"), "not compared with one label"),
        (GOOD.replace("(>= Y_0 Y_1)", "(or (and (>= Y_0 Y_1) (>= Y_2 Y_1)))"), "alternative"),
        (GOOD.replace("(>= Y_0 Y_1)", "(or)"), "not compared"),
    ],
)
def test_damaged_files(text, message, tmp_path):
    (tmp_path / "p.vnnlib").write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read_property(tmp_path / "p.vnnlib")
    assert "p.vnnlib" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_binary_files(tmp_path):
    (tmp_path / "p.vnnlib").write_bytes(b"\xff\xfe")
    for name in ("p.vnnlib", "missing.vnnlib", ""):
        with pytest.raises(DataError):
            read_property(tmp_path / name)


def test_what_cannot_be_stated(tmp_path):
    x, y = images()
    threat = Threat(0.1, clip=(0, 1))
    for arguments, options, message in (
        ((x, y, Threat(0.1, "l2")), {}, "norm='l2', expected 'linf'"),
        ((x, y[:2], threat), {}, "4 images of shape"),
        ((x[:0], y[:0], threat), {}, "0 images"),
        ((x * float("nan"), y, threat), {}, "expected one for each"),
        ((x, y, threat), {"num_classes": 2}, "labels 0 to 2"),
        ((x, y - 1, threat), {}, "labels -1 to"),
        ((x + 5, y, threat), {}, "outside the box"),
        ((x, y, threat), {"timeout_s": 0}, "timeout_s=0"),
        ((x, y, threat), {"network": "a,b"}, "a plain name"),
    ):
        with pytest.raises(InputError, match=message):
            write_properties(tmp_path / "out", *arguments, **({"num_classes": 4} | options))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be created"):
        write_properties(tmp_path / "file", x, y, threat, num_classes=4)
