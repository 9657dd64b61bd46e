"""The pools in zoo/: whole, small enough, and certifying what was published, image by image."""

import json
import os
from pathlib import Path

import pytest
import torch

from robboost.certification import certify
from robboost.data import load_dataset
from robboost.data.loading import embedded_positions
from robboost.models import read_mix
from robboost.reproduce.loading import threat_of
from robboost.reproduce.page import fill_page
from robboost.reproduce.summaries import unpacked
from robboost.reproduce.zoo import LIMIT_BYTES, RESULTS, folder_bytes

ZOO = Path(__file__).parents[1] / "zoo"
DOCS = Path(__file__).parents[1] / "docs"
POOLS = sorted(manifest.parent for manifest in ZOO.glob("*/manifest.json"))


def published(folder, shipped, images, labels, positions):
    """Compares the verdicts on these images, which stand at these positions of the test set."""
    results = json.loads((folder / RESULTS).read_text())
    method, total = shipped.notes["bounds"], results["test"]["images"]
    certificate = certify(shipped.ensemble, images, labels, threat_of(shipped.pool), method=method)
    assert certificate.certified.tolist() == unpacked(results["certified"]["RobBoost"], total)[positions].tolist()
    return certificate


def test_everything_that_ships():
    """SHA-256 of every file (read_mix compares them), the size, and a few certificates of every pool."""
    assert folder_bytes(ZOO) <= LIMIT_BYTES
    for folder in POOLS:
        shipped = read_mix(folder)
        stated = shipped.notes["published"]
        assert stated["split"] == "test"
        assert stated["images"] == 10_000
        results = json.loads((folder / RESULTS).read_text())
        row = results["rows"]["RobBoost"]["verified_test"]
        verdicts = unpacked(results["certified"]["RobBoost"], 10_000)
        assert stated["not_certified"] == row["count"] == int((~verdicts).sum())
        for member in shipped.pool.members:
            assert all(torch.equal(value, value.half().float()) for value in member.model.parameters())
        if shipped.notes["dataset"] == "mnist":
            test = load_dataset("mnist-small", split="test").take(2)
            published(folder, shipped, test.images, test.labels, torch.tensor(embedded_positions("test")[:2]))
        else:  # no photographs ship: that it can be certified at all
            x = torch.rand(1, *shipped.pool.input_shape, generator=torch.Generator().manual_seed(0))
            y = shipped.ensemble(x).argmax(1)
            threat = threat_of(shipped.pool)
            assert certify(shipped.ensemble, x, y, threat, method=shipped.notes["bounds"]).margins.isfinite().all()


def test_the_results_page_says_what_was_measured(tmp_path):
    """Fails where results changed and `robboost reproduce page docs/results.md` was not run."""
    copy = tmp_path / "results.md"
    copy.write_bytes((DOCS / "results.md").read_bytes())
    found = fill_page(copy, ZOO, DOCS / "results")
    assert copy.read_text() == (DOCS / "results.md").read_text()
    assert found["zoo"] == bool(POOLS)


@pytest.mark.full_data
@pytest.mark.skipif("ROBBOOST_DATA" not in os.environ, reason="needs the official files in ROBBOOST_DATA")
@pytest.mark.skipif(not POOLS, reason="no pool ships with this version")
def test_published_figures_on_a_part_of_the_test_set():
    """Every 100th test image of the pool named first; `robboost certify zoo/NAME` does it on all."""
    folder = next((path for path in POOLS if path.name == "mnist-0.3"), POOLS[0])
    shipped = read_mix(folder)
    positions = torch.arange(0, 10_000, 100)
    test = load_dataset(shipped.notes["dataset"], split="test").take(positions)
    certificate = published(folder, shipped, test.images, test.labels, positions)
    assert certificate.certified.any()


def test_readme_repeats_the_published_figures():
    lines = (Path(__file__).parents[1] / "README.md").read_text().splitlines()
    found = 0
    for line in lines:
        if not line.startswith(("| MNIST, l_inf", "| CIFAR-10, l_inf")):
            continue
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        data, eps = cells[0].split(", l_inf ")
        pool = f"{data.lower().replace('-', '')}-{eps.replace('/', '-')}"
        results = json.loads((ZOO / pool / RESULTS).read_text())
        for cell, row in ((cells[3], results["best_single"]), (cells[4], "RobBoost")):
            share = results["rows"][row]["verified_test"]
            low, high = share["lower"], share["upper"]
            assert cell == f"{100 * share['value']:.2f} [{100 * low:.2f}, {100 * high:.2f}]"
            found += 1
    assert found
