"""The README's example prints what it says, and the demo's table is what the demo's networks give."""

import contextlib
import io
import re
from pathlib import Path

import torch

import robboost as rb
from robboost.combinations import all_certify, some_certify
from robboost.intervals import Share, paired_test
from robboost.models import demo_pool
from robboost.models.architectures import float32_bytes
from robboost.tables import test_sentence as sentence

README = (Path(__file__).parents[1] / "README.md").read_text()
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def test_example_and_output():
    code, expected = re.search(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.DOTALL).groups()
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    said, got = expected.strip(), printed.getvalue().strip()
    assert NUMBER.sub("#", got) == NUMBER.sub("#", said)
    # Another machine rounds otherwise: weights move by thousandths, and an image may change sides.
    for a, b in zip(NUMBER.findall(got), NUMBER.findall(said), strict=True):
        assert abs(float(a) - float(b)) <= 0.02 * abs(float(b)) + 1.1, (a, b)


def demo_table():
    """Rows of the demo's table by name: errors as counts of its 1,000 images, None for "-", megabytes, claim."""
    rows = {}
    body = README.split("| | verified error, test", 1)[1].split("\n\n", 1)[0]
    for line in body.splitlines()[2:]:
        name, verified, *others, size, claim = (cell.strip(" *") for cell in line.strip("|").split("|"))
        counts = [None if cell == "-" else round(10 * float(cell.split()[0])) for cell in (verified, *others)]
        rows[name] = [*counts, size, claim]
        assert verified == f"{Share(counts[0], 1000):i}", name
    return rows


def test_table_of_the_demo_is_what_its_networks_give():
    """Recomputed here: what members certify alone. The rest must agree with that and with itself."""
    table, pool = demo_table(), demo_pool()
    assert [row[-1] for row in table.values()] == ["proved"] * 5 + ["UNSOUND"] + ["oracle"] * 2
    test, threat = rb.load_dataset("mnist-small", split="test"), rb.Threat(0.1, clip=(0, 1))
    found = [rb.certify(member, test.images, test.labels, threat, method="ibp+crown-ibp") for member in pool.models]
    certified = torch.stack([certificate.certified for certificate in found])
    best, size = table["best single (conv-a)"], float32_bytes(pool.models[0]) / 1e6
    wrong = (int((~certified[0]).sum()), int((~found[0].correct).sum()))
    # An image on the edge may change sides on another machine.
    assert abs(best[0] - wrong[0]) <= 1
    assert abs(best[2] - wrong[1]) <= 1
    assert best[4] == f"{size:.2f}"
    assert table["uniform"][4] == f"{sum(float32_bytes(member) for member in pool.models) / 1e6:.2f}"
    for name, oracle in (("some member certifies", some_certify), ("all members certify", all_certify)):
        assert abs(table[name][0] - int((~oracle(certified)).sum())) <= 1, name
    for name, (verified, _, clean, attacked, _, claim) in table.items():
        assert claim != "proved" or clean <= attacked <= verified, name


def test_sentences_of_the_demo_agree_with_its_table():
    table, ours = demo_table(), demo_table()["RobBoost"][0]
    for against, name in (("best single", "best single (conv-a)"), ("uniform", "uniform")):
        line = re.search(rf"^- (RobBoost against {against}: .*)\.$", README, re.MULTILINE)[1]
        gained, lost = map(int, re.search(r"(\d+) gained, (\d+) lost", line).groups())
        assert gained - lost == table[name][0] - ours
        masks = torch.tensor([[False, True]] * gained + [[True, False]] * lost)
        assert line == sentence(f"RobBoost against {against}", paired_test(masks[:, 0], masks[:, 1]).to_dict())
    fooled, claimed = map(int, re.search(r"fooled (\d+) of the (\d+) images", README).groups())
    assert claimed == 1000 - table["cascade"][0]
    assert fooled <= table["cascade"][3]


def test_every_link_into_the_repository_exists():
    root = Path(__file__).parents[1]
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (root / target).exists(), target
