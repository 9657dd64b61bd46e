"""Tables, figures and the page on tiny pools, from the command and from `python -m robboost.reproduce`."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from small_pools import pool
from small_runs import quick, trained_run

import robboost.reproduce.request as requests
from robboost.cli import main
from robboost.data import load_dataset
from robboost.errors import InputError
from robboost.models import PoolMember, write_pool
from robboost.reproduce import COMMANDS, reproduce
from robboost.reproduce.__main__ import main as module_main
from robboost.reproduce.page import SECTIONS
from robboost.reproduce.paper import MAIN
from robboost.reproduce.summaries import unpacked
from robboost.training import TrainConfig, load_pool
from robboost.training.boosting import boost
from robboost.training.boosting_config import BoostConfig
from robboost.training.config import PoolConfig
from robboost.training.pool import RunOptions

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    """POOLS/mnist-0.3 with its results beside it, POOLS/paper-mnist-0.3 without."""
    folder = tmp_path_factory.mktemp("pools")
    run = trained_run(folder / "runs")
    reproduce("zoo", [run], quick(folder / "runs", out=folder))
    trained_run(folder, "paper-mnist-0.3")
    return folder


def test_table_2(pools):
    table = reproduce("table2", [], quick(pools, settings=("mnist-0.3",), out=pools / "out"))
    rows = table.values["rows"]
    assert [row[1:3] for row in rows[:3]] == [
        ["paper", "uniform"],
        ["paper", "RobBoost"],
        ["paper-mnist-0.3", rows[2][2]],
    ]
    assert float(rows[1][4]) == MAIN["mnist-0.3"]["RobBoost"].verified_test
    assert len(rows) == 8
    for pool_name, first in (("paper-mnist-0.3", 2), ("mnist-0.3", 5)):
        figures = table.values["figures"][pool_name]
        best = figures["best_single"]
        for row, name in zip(rows[first : first + 3], (best, "uniform", "RobBoost"), strict=True):
            values = figures["rows"][name]
            assert row[3] == f"{100 * values['verified_train']['value']:.2f}"
            assert row[4].startswith(f"{100 * values['verified_test']['value']:.2f} [")
            assert row[5:7] == [f"{100 * values[key]['value']:.2f}" for key in ("clean", "attack")]
    saved = json.loads((pools / "out" / "table2.json").read_text())
    assert saved["rows"] == rows
    assert (pools / "out" / "table2.md").read_text().count("\n| ") >= 8
    assert table.text.splitlines()[0] == table.values["title"]


def test_results_beside_a_pool_are_taken_where_nothing_else_is_asked(pools, monkeypatch):
    monkeypatch.setattr(requests, "measured", lambda *_: pytest.fail("measured again"))
    request = quick(pools, data=None, settings=("mnist-0.3",))
    assert requests.figures_of("mnist-0.3", request, None)["name"] == "mnist-0.3"
    with pytest.raises(pytest.fail.Exception):
        requests.figures_of("mnist-0.3", quick(pools, data=None, fresh=True), None)


def test_table_1(pools):
    table = reproduce("table1", [], quick(pools, settings=("mnist-0.3",))).values
    (row,) = table["rows"]
    counts = table["figures"]["paper-mnist-0.3"]["eliminated"]["train"]
    assert row[2] == f"{100 * counts['pairs_robust_to_all'] / counts['pairs']:.2f}"
    assert row[4:6] == ["69.69", "2.84"]
    assert "removing them is no exact step" in table["notes"][0]


def test_table_3_and_diversity(pools, tmp_path):
    found = trained_run(tmp_path, "diversity-seeds")
    table = reproduce("diversity", [], quick(tmp_path)).values
    assert table["rows"][0][:2] == ["seeds", "3"]
    assert "diversity-architectures, diversity-methods" in table["notes"][-1]
    found.rename(tmp_path / "paper-mnist-0.3-subsampled")
    with pytest.raises(InputError, match=r"paper-mnist-0\.3-subsampled: 3 members; expected five"):
        reproduce("table3", [], quick(tmp_path))
    models = [*pool(), *pool()]
    for n, model in enumerate(models):
        next(model.parameters()).data += 1e-3 * n
    members = [PoolMember(f"K{n}", model, (1, 6, 6), config={"eps": 0.05}) for n, model in enumerate(models[:5])]
    for file in (tmp_path / "paper-mnist-0.3-subsampled").iterdir():
        file.unlink()
    write_pool(tmp_path / "paper-mnist-0.3-subsampled", members, {"dataset": "mnist"})
    rows = reproduce("table3", [], quick(tmp_path, bounds="ibp", steps=0)).values["rows"]
    assert rows[0][:4] == ["MNIST 0.3", "paper", "clean", "12.96"]
    assert len(rows) == 6  # both settings of the paper, and the one pool that is there
    assert len(rows[2]) == 10


def test_a_missing_pool(pools, monkeypatch):
    with pytest.raises(InputError, match=r"none of the pools paper-mnist-0\.1, mnist-0\.1 is there; expected"):
        reproduce("table2", [], quick(pools, settings=("mnist-0.1",)))
    monkeypatch.setattr(requests, "load_pool", lambda name: load_pool(f"no-{name}"))
    with pytest.raises(InputError, match=r"recipe 'paper-mnist-0\.3-sub.*' does not ship with this version"):
        reproduce("table3", [], quick(pools, settings=("mnist-0.3",), train=True))
    with pytest.raises(InputError, match="none of the pools of these settings is there"):
        reproduce("figure3", [], quick(pools, settings=("mnist-0.1",)))


def test_pools_are_trained_first(tmp_path, monkeypatch):
    tiny = TrainConfig("conv 2 4x4/2, fc 8", "ibp", 0.05, epochs=1, batch=25, name="a")

    def recipe(path):
        return PoolConfig(Path(path).stem, "mnist-small", (replace(tiny, pool=Path(path).stem),))

    monkeypatch.setattr(requests, "load_pool", recipe)
    request = quick(tmp_path, train=True, data="mnist-small", limit=50, epochs=2, bounds="ibp", steps=0)
    seen = []
    table = reproduce("diversity", [], request, lambda what, *_: seen.append(what)).values
    assert [row[0] for row in table["rows"]] == ["seeds", "architectures", "methods"]
    assert (tmp_path / "diversity-seeds" / "a.safetensors").exists()
    assert any(what.startswith("training") for what in seen)


@pytest.mark.parametrize("name", ["diversity-seeds", "diversity-architectures", "diversity-methods"])
def test_recipes_of_equal_size(name):
    from robboost.models.architectures import build, float32_bytes

    config = load_pool(requests._RECIPES / f"{name}.toml")
    size = sum(float32_bytes(build(member.architecture, (1, 28, 28))) for member in config.members)
    assert len(config.members) == 5
    assert size / 1e6 == pytest.approx(3.33, abs=0.02)


def test_figure_1(tmp_path):
    request = quick(tmp_path, data="mnist-small", limit=60, epochs=1)
    values = reproduce("figure1", [], request).values
    assert (values["digit"], values["target"], values["eps"]) == (1, 2, 0.05)
    test = load_dataset("mnist-small", split="test")
    assert int(test.labels[values["image"]["position"]]) == 1
    for network in values["networks"].values():
        total = sum(abs(value) for row in network["slope"] for value in row)
        assert total == pytest.approx(network["l1"], rel=1e-3)
        assert 0 < network["on_digit"] < 1
    drawn = [(tmp_path / "zoo" / f"figure1.{kind}").read_bytes() for kind in ("png", "svg")]
    assert drawn[0].startswith(b"\x89PNG")
    assert b"<svg" in drawn[1]
    # Saved numbers give the same picture, byte for byte.
    saved = tmp_path / "zoo" / "figure1.json"
    reproduce("figure1", [saved], quick(tmp_path, out=tmp_path / "again"))
    assert [(tmp_path / "again" / f"figure1.{kind}").read_bytes() for kind in ("png", "svg")] == drawn
    with pytest.raises(InputError, match=r"figure1\.json: expected the numbers of figure 3"):
        reproduce("figure3", [saved], quick(tmp_path))


@pytest.fixture(scope="module")
def boosted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("boosted")
    stages = tuple(
        TrainConfig(text, "ibp", 0.05, epochs=2, batch=50, seed=n)
        for n, text in enumerate(("conv 2 4x4/2, fc 8", "fc 12"))
    )
    config = BoostConfig("boost-mnist-0.3", "mnist-small", stages)
    train, held = (load_dataset("mnist-small", split=split).take(200) for split in ("train", "heldout"))
    result = boost(config, train, heldout=held, options=RunOptions(out=folder, device="cpu"))
    return folder, result


def test_figure_2(boosted, tmp_path):
    from robboost.certification import certify

    folder, result = boosted
    request = quick(folder, data="mnist-small", limit=40, settings=("mnist-0.3",), out=tmp_path)
    values = reproduce("figure2", [], request).values["runs"]["boost-mnist-0.3"]
    test = load_dataset("mnist-small", split="test").take(40)
    for count in (1, 2):
        certificate = certify(
            result.after(count), test.images, test.labels, result.config.threat, method=result.config.certificate
        )
        assert values["verified"][count - 1]["count"] == int((~certificate.certified).sum())
        assert values["clean"][count - 1]["count"] == int((~certificate.correct).sum())
    assert values["paper"] == {"first": 39.8, "ensemble": 34.6}
    assert (tmp_path / "figure2.svg").exists()
    with pytest.raises(InputError, match=r"nothing: no boosting\.json; expected the folder of a finished run"):
        reproduce("figure2", [folder / "nothing"], request)


def test_figure_2_beside_the_fitted_pool(boosted, tmp_path):
    folder, _ = boosted
    test = load_dataset("mnist-small", split="test").take(40)
    results = {"test": {"sha256": test.sha256()}, "certified": {"RobBoost": "0f" * 5}}
    (tmp_path / "mnist-0.3").mkdir()
    (tmp_path / "mnist-0.3" / "results.json").write_text(json.dumps(results))
    request = quick(tmp_path, data="mnist-small", limit=40, out=tmp_path)
    values = reproduce("figure2", [folder / "boost-mnist-0.3"], request).values["runs"]["boost-mnist-0.3"]
    assert values["fitted_pool"]["count"] == 20
    failed = ~unpacked("0f" * 5, 40)
    mine = unpacked(values["failed"], 40)
    assert int(mine.sum()) == values["verified"][values["chosen"] - 1]["count"]
    test = values["tests"]["chosen against the fitted pool"]
    assert test["only_first_fails"] == int((mine & ~failed).sum())
    assert test["only_second_fails"] == int((failed & ~mine).sum())


def test_figure_3(pools, tmp_path):
    values = reproduce("figure3", [], quick(pools, settings=("mnist-0.3",), out=tmp_path)).values
    assert set(values["pools"]) == {"mnist-0.3", "paper-mnist-0.3"}
    assert (tmp_path / "figure3.png").exists()


def test_without_matplotlib_the_numbers_are_there(pools, tmp_path, monkeypatch):
    import robboost.reproduce.commands as commands
    import robboost.reproduce.drawing as drawing

    monkeypatch.setattr(commands, "can_draw", lambda: False)
    outcome = reproduce("figure3", [], quick(pools, settings=("mnist-0.3",), out=tmp_path))
    assert "matplotlib is missing here" in outcome.text
    assert not (tmp_path / "figure3.png").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not drawing.can_draw()
    with pytest.raises(InputError, match="matplotlib is missing"):
        drawing.draw(outcome.values, tmp_path)
    with pytest.raises(InputError, match="figure 9: expected the saved numbers"):
        drawing.draw({"figure": 9}, tmp_path)


def test_the_page(pools, tmp_path):
    page = tmp_path / "results.md"
    page.write_text((DOCS / "results.md").read_text())
    results = tmp_path / "results"
    reproduce("figure3", [], quick(pools, settings=("mnist-0.3",), out=results))
    share = {"count": 3, "total": 10, "value": 0.3, "lower": 0.1, "upper": 0.6}
    run = {
        "kind": "alone",
        "chosen": "fitted",
        "threat": "linf 0.3",
        "bounds": "ibp",
        "test_images": 10,
        "test": [{"name": "fitted", "members": 2, "size_mb": 1.0, "verified_error": share, "clean_error": share}],
        "paired": {"average": {"only_first_fails": 1, "only_second_fails": 4, "p_value": 0.375}},
    }
    (results / "boost-mnist-0.3-alone.json").write_text(json.dumps(run))
    found = reproduce("page", [page], quick(pools, out=None)).values["sections"]
    assert set(found) == set(SECTIONS)
    assert {name for name, there in found.items() if there} == {"table2", "zoo", "figure3", "boosting"}
    text = page.read_text()
    figures = json.loads((pools / "mnist-0.3" / "results.json").read_text())
    error = f"{100 * figures['rows']['RobBoost']['verified_test']['value']:.2f}"
    assert "| MNIST 0.3 | mnist-0.3 | RobBoost | " in text
    assert f" | {error} [" in text
    assert "![figure3](results/figure3.png)" in text
    assert "| boost-mnist-0.3-alone | fitted * | 2 | 1.00 | 30.00 [10.00, 60.00] | 30.00 |" in text
    reproduce("page", [page], quick(pools, out=None))
    assert page.read_text() == text  # filling in twice changes nothing


def test_pages_that_cannot_be_filled(tmp_path):
    with pytest.raises(InputError, match="page: 0 pages named"):
        reproduce("page", [], quick(tmp_path))
    with pytest.raises(InputError, match="cannot be read"):
        reproduce("page", [tmp_path / "none.md"], quick(tmp_path))
    page = tmp_path / "a.md"
    page.write_text("nothing to fill")
    with pytest.raises(InputError, match="no section; expected '<!-- begin NAME -->'"):
        reproduce("page", [page], quick(tmp_path))
    page.write_text("<!-- begin table9 -->\n<!-- end table9 -->")
    with pytest.raises(InputError, match="section 'table9'; expected one of table1"):
        reproduce("page", [page], quick(tmp_path))


def test_the_command(pools, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = [
        "reproduce",
        "table2",
        "--pools",
        str(pools),
        "--settings",
        "mnist-0.3",
        "--limit",
        "20",
        "--steps",
        "2",
    ]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--data", str(pools / "images.npz"), "--json"])
    assert end.value.code == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 8
    for wrong in (["reproduce", "table9"], ["reproduce", "table1", "more"], [*arguments[:2], "--settings", "x"]):
        with pytest.raises(SystemExit) as end:
            main(wrong)
        assert end.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_twin_needs_neither_typer_nor_matplotlib(pools, tmp_path):
    absent = ("typer", "click", "rich", "zarr", "pooch", "numba", "matplotlib", "onnx", "pandas")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r})); from robboost.reproduce.__main__ import main;"
        " sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["table1", "--pools", str(pools), "--settings", "mnist-0.3", "--data", str(pools / "images.npz")]
    arguments += ["--steps", "0", "--limit", "9", "--bounds", "ibp", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0][4] == "69.69"
    assert "bounds (ibp)" in done.stderr


def test_the_twin_has_the_options_of_the_command(pools, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["reproduce", "--help"])
    command = capsys.readouterr().out
    with pytest.raises(SystemExit):
        module_main(["--help"])
    twin = capsys.readouterr().out
    names = {field.replace("_", "-") for field in requests.Request.__dataclass_fields__}
    assert all(f"--{name}" in command and f"--{name}" in twin for name in names)
    assert module_main(["nothing"]) == 2
    assert "expected one of table1" in capsys.readouterr().err
    assert module_main(["table2", "--pools", str(pools), "--settings", "mnist-0.3"]) == 2  # 6x6 images: not MNIST's


def test_an_unknown_command_names_the_known_ones(tmp_path):
    with pytest.raises(InputError, match=f"'x': expected one of {', '.join(COMMANDS)}"):
        reproduce("x", [], quick(tmp_path))
