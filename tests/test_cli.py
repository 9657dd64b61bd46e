"""A user's session by subprocess, from an empty folder; and one line with exit code 2 for everything wrong."""

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from small_pools import SHAPE, examples, pool

import robboost
import robboost.comparison
import robboost.mixtures
from robboost import SoundnessError
from robboost.cli import main
from robboost.models import PoolMember, save_model, write_pool
from robboost.models.architectures import build

SOURCE = str(Path(robboost.__file__).parents[1])
POOL = str(Path(robboost.__file__).parent / "models" / "demo_pool")


def environment(folder):
    own = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "ROBBOOST_DATA": str(folder / "none")}
    return {**os.environ, **own, "ROBBOOST_WORK": str(folder / "unfinished")}


def run(folder, *arguments):
    command = [sys.executable, "-m", "robboost", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300)


RECIPE = {
    "name": "tiny",
    "dataset": "mnist-small",
    "defaults": {"architecture": "conv 2 4x4/2, fc 10", "eps": 0.05, "epochs": 4, "batch": 50},
    "members": [{"seed": 0}, {"seed": 1}, {"seed": 2, "method": "natural"}],
}


def test_a_users_session_from_an_empty_folder(tmp_path):
    """train, look, bounds, fit, certify, attack, compare, report, export: each by its own process, figures agree."""
    (tmp_path / "tiny.json").write_text(json.dumps(RECIPE))
    forty = ["--limit", 40, "--json"]
    bounds = ["--bounds", "ibp+crown"]
    commands = {
        "train": ["train", "tiny.json", "--out", "pool", "--limit", 300, "--device", "cpu", "--json"],
        "bounds": ["bounds", "pool", "--store", "store", *bounds, *forty],
        "fit": ["fit", "pool", "--store", "store", *forty],
        "certify": ["certify", "ensemble.safetensors", *bounds, *forty],
        "attack": ["attack", "ensemble.safetensors", "--steps", 10, "--out", "points.npz", *forty],
        "report": ["report", "pool", *bounds, "--fit-limit", 40, "--steps", 3, "--restarts", 1, *forty],
        "export": ["export", "ensemble.safetensors", "--out", "mix.onnx", "--vnnlib", 2, "--json"],
    }
    values = {}
    for name, arguments in commands.items():
        result = run(tmp_path, *arguments)
        assert result.returncode == 0, (name, result.stderr)
        assert "Traceback" not in result.stderr
        values[name] = json.loads(result.stdout)
    assert len(values["train"]["members"]) == 3
    assert sum(values["fit"]["weights"]) == pytest.approx(1)
    assert values["fit"]["solution"]["gap"] <= 1e-5
    assert values["certify"]["threat"] == "linf 0.05 within [0, 1]"  # read from the ensemble's file
    verified = values["certify"]["verified_error"]["value"]
    attacked = values["attack"]["attack_error"]["value"]
    clean = values["certify"]["clean_error"]["value"]
    assert verified >= attacked >= clean == values["attack"]["clean_error"]["value"]
    assert np.load(tmp_path / "points.npz")["images"].shape == (40, 1, 28, 28)
    rows = {row["name"]: row for row in values["report"]["rows"]}
    for row in rows.values():
        if row["claim"] == "proved":
            assert row["verified_error"]["value"] >= row["attack_error"]["value"] >= row["clean_error"]["value"]
    assert "<svg" in (tmp_path / "report" / "report.html").read_text()
    assert values["export"]["largest_difference"] <= 1e-5
    assert not (tmp_path / "unfinished").exists() or not list((tmp_path / "unfinished").iterdir())
    # The file that came out is what the certificate is about: loaded by Python, certified again, the same.
    test = robboost.load_dataset("mnist-small", split="test").take(40)
    ensemble = robboost.load_model(tmp_path / "ensemble.safetensors")
    again = robboost.certify(ensemble, test.images, test.labels, robboost.Threat(0.05, clip=(0, 1)), method="ibp+crown")
    assert again.certified.tolist() == values["certify"]["certified"]


def call(*arguments):
    """The command in this process: its exit code."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return end.value.code


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with a small pool of its own, and images as .npz: 'fit' and 'test'."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROBBOOST_WORK", str(tmp_path.parent / f"{tmp_path.name}-unfinished"))
    members = [PoolMember(f"m{n}", model, SHAPE, seed=n) for n, model in enumerate(pool())]
    write_pool("pool", members, {"threat": {"eps": 0.1, "norm": "linf", "clip": [0, 1]}})
    for name, seed in (("fit", 41), ("test", 42)):
        x, y = examples(24, seed)
        np.savez(f"{name}.npz", images=x.numpy(), labels=y.numpy())
    return tmp_path


def test_compare_report_and_export(tiny, capsys):
    fast = ["--data", "test.npz", "--fit-data", "fit.npz", "--bounds", "ibp+crown", "--steps", 5, "--restarts", 1]
    assert call("compare", "pool", *fast, "--save", "result.json", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    saved = json.loads(Path("result.json").read_text())
    assert values["rows"] == saved["rows"]
    assert [row["name"] for row in saved["rows"]][1:3] == ["uniform", "RobBoost"]
    assert call("report", "pool", *fast, "--out", "page") == 0
    assert "RobBoost against uniform" in capsys.readouterr().out
    assert (tiny / "page" / "report.html").exists()
    hashes = [entry["sha256"] for entry in json.loads(Path("pool/manifest.json").read_text())["members"]]
    assert all(digest in Path("page/report.html").read_text() for digest in hashes)
    assert call("fit", "pool", "--data", "fit.npz", "--bounds", "crown", "--out", "mix.safetensors") == 0
    assert call("export", "mix.safetensors", "--out", "mix.onnx", "--vnnlib", 3, "--data", "test.npz", "--json") == 0
    exported = json.loads(capsys.readouterr().out.split("saved")[1].split("\n", 1)[1])
    assert exported["largest_difference"] <= 1e-5
    assert exported["properties"] == 3
    assert len(list(tiny.rglob("*.vnnlib"))) == 3


def test_a_list_of_files_and_saved_adversarial_images(tiny, capsys):
    assert (
        call(
            "fit", "pool/m0.safetensors", "pool/m1.safetensors", "--data", "fit.npz", "--eps", "0.1", "--bounds", "ibp"
        )
        == 0
    )
    attack = ["attack", "ensemble.safetensors", "--data", "test.npz", "--steps", 3, "--targets", "targeted"]
    assert call(*attack, "--out", "adversarial.npz") == 0
    points, images = np.load("adversarial.npz")["images"], np.load("test.npz")["images"]
    assert np.abs(points - images).max() <= 0.1 + 1e-12
    assert call("models", "pool", "--json") == 0
    assert (
        call("certify", "pool/m0.safetensors", "--data", "test.npz", "--eps", "1/20", "--norm", "l2", "--clip", "none")
        == 0
    )
    assert "l2 0.05" in capsys.readouterr().out


def test_small_commands(capsys):
    for arguments in (["models"], ["models", "--json"], ["data"], ["data", "--json"], ["--version"], ["--help"]):
        assert call(*arguments) == 0
    assert (
        call("bench", "--images", 2, "--pairs", 50, "--architecture", "fc 8", "--input-shape", "1,4,4", "--json") == 0
    )
    assert '"images_per_second"' in capsys.readouterr().out


def test_train_writes_a_pool_with_its_manifest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = {
        "name": "tiny",
        "dataset": "mnist-small",
        "defaults": {"architecture": "conv 2 4x4/2, fc 8", "eps": 0.05, "epochs": 2, "batch": 50},
        "members": [{"seed": 0}, {"seed": 1, "method": "natural"}],
    }
    Path("tiny.json").write_text(json.dumps(recipe))
    assert call("train", "tiny.json", "--out", "trained", "--limit", 200, "--device", "cpu", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["members"]) == 2
    manifest = json.loads(Path("trained/manifest.json").read_text())
    assert manifest["notes"]["dataset"] == "mnist-small"
    assert manifest["notes"]["threat"]["eps"] == 0.05
    assert "<svg" in Path("trained/training.svg").read_text()
    # What was trained can be used at once, its data and threat are known.
    assert call("fit", "trained", "--limit", 30, "--bounds", "ibp", "--out", "mix.safetensors") == 0


def wrong_inputs(folder):
    """Commands that must fail, and what their one line must name."""
    good = ["--data", "fit.npz"]
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("not a network")
    broken = folder / "broken"
    shutil.copytree(folder / "pool", broken)
    content = bytearray((broken / "m1.safetensors").read_bytes())
    content[-1] ^= 1
    (broken / "m1.safetensors").write_bytes(content)
    shutil.copy(folder / "pool" / "m0.safetensors", folder / "again.safetensors")
    save_model(build("fc 4", (1, 5, 5), num_classes=3, seed=0), folder / "other.safetensors", input_shape=(1, 5, 5))
    save_model(build("fc 4", (1, 9, 9), num_classes=3, seed=0), folder / "nine.safetensors", input_shape=(1, 9, 9))
    np.savez(folder / "wrong-labels.npz", images=np.zeros((3, 1, 6, 6), np.float32), labels=np.array([0, 1, 7]))
    np.savez(folder / "wrong-shape.npz", images=np.zeros((3, 6), np.float32), labels=np.array([0, 1, 2]))
    np.savez(folder / "none.npz", images=np.zeros((0, 1, 6, 6), np.float32), labels=np.zeros(0, np.int64))
    np.savez(folder / "nan.npz", images=np.full((3, 1, 6, 6), np.nan, np.float32), labels=np.array([0, 1, 2]))
    member, other, again, notes = "pool/m0.safetensors", "other.safetensors", "again.safetensors", "notes.txt/"
    for command in ("fit", "compare", "report"):
        more = [] if command == "fit" else ["--fit-data", "fit.npz"]
        data = [*good, *more]
        yield [command, "missing", *data], "missing"
        yield [command, "empty", *data], "0 models"
        yield [command, "broken", *data], "m1.safetensors: SHA-256"
        yield [command, "notes.txt", *data, "--eps", "0.1"], "notes.txt"
        yield [command, member, again, *data, "--eps", "0.1"], "again.safetensors: the same network"
        yield [command, member, other, *data, "--eps", "0.1"], "one shape for all members"
        yield [command, member, *data], "--eps is missing"
        yield [command, "pool"], "--data is missing"
        yield [command, "pool", *data, "--eps", "-1"], "eps='-1'"
        yield [command, "pool", *data, "--norm", "l7"], "norm='l7'"
        yield [command, "pool", *data, "--clip", "1,0"], "clip="
        yield [command, "pool", *data, "--clip", "a,b"], "--clip 'a,b'"
        yield [command, "pool", *data, "--bounds", "magic"], "method='magic'"
        yield [command, "pool", *data, "--limit", "0"], "take(0)"
        yield [command, "pool", *data, "--threads", "0"], "--threads 0"
        for name, message in [
            ("absent.npz", "absent.npz"),
            ("wrong-labels.npz", "labels reach"),
            ("wrong-shape.npz", "images are"),
            ("none.npz", "no images"),
            ("nan.npz", "pixels reach"),
            ("imagenet", "data set 'imagenet'"),
        ]:
            yield [command, "pool", "--data", name, *more], message
    yield ["fit", "pool", *good, "--kappa", "big"], "--kappa 'big'"
    yield ["fit", "pool", *good, "--max-members", "0"], "max_members=0"
    yield ["fit", "pool", *good, "--max-megabytes", "1e-9"], "max_megabytes"
    yield ["fit", "pool", *good, "--method", "luck"], "method='luck'"
    yield ["fit", "pool", *good, "--out", "mix.zip"], "ends in .safetensors"
    yield ["fit", "pool", *good, "--out", f"{notes}mix.safetensors"], "cannot be written"
    yield ["fit", "pool", *good, "--store", "no-store"], "no-store"
    yield ["compare", "pool", "--data", "test.npz"], "--fit-data"
    yield (
        ["compare", "pool", "--data", "test.npz", "--fit-data", "fit.npz", "--save", f"{notes}x.json"],
        "cannot be written",
    )
    yield ["report", "pool", "--data", "test.npz", "--fit-data", "fit.npz", "--out", "notes.txt"], "cannot be written"
    for command in ("certify", "attack"):
        yield [command, "missing.safetensors", *good], "missing"
        yield [command, "notes.txt", *good, "--eps", "0.1"], "notes.txt"
        yield [command, "broken", *good], "broken/m1.safetensors: SHA-256 is "
        yield [command, "pool", *good], "pool/manifest.json: names no mix of the pool"
        yield [command, member, *good], "--eps is missing"
        yield [command, "nine.safetensors", *good, "--eps", "0.1"], "does not take images"
        yield [command, member, "--data", "wrong-labels.npz", "--eps", "0.1"], "labels reach"
    yield ["attack", member, *good, "--eps", "0.1", "--steps", "0"], "steps=0"
    yield ["attack", member, *good, "--eps", "0.1", "--targets", "all"], "targets='all'"
    yield ["attack", member, *good, "--eps", "0.1", "--autoattack", "luck"], "autoattack='luck'"
    yield ["attack", member, *good, "--eps", "0.1", "--autoattack", "fab", "--clip", "none"], "clip=None"
    yield ["attack", member, *good, "--eps", "0.1", "--out", f"{notes}x.npz"], "cannot be written"
    yield ["export", member, "--out", "net.pb"], "ends in .onnx"
    yield ["export", member, "--out", "net.onnx", "--vnnlib", "-1"], "--vnnlib -1"
    yield ["export", member, "--out", f"{notes}net.onnx"], "cannot be written"
    yield ["export", "missing.safetensors", "--out", "net.onnx"], "missing"
    yield ["export", member, "--out", "net.onnx", "--vnnlib", "2", "--eps", "0.1"], "--data is missing"
    yield ["export", member, "--out", "net.onnx", "--vnnlib", "2", "--eps", "0.1", "--data", "none.npz"], "no images"
    yield ["export", member, "--out", "net.onnx", "--vnnlib", "2", "--data", "fit.npz"], "--eps is missing"
    wrong = ["--vnnlib", "2", "--eps", "0.1", "--data", "wrong-labels.npz"]
    yield ["export", "nine.safetensors", "--out", "net.onnx", *wrong], "does not take images"
    yield ["export", member, "--out", "net.onnx", "--batch-size", "0"], "batch_size=0"
    yield ["export", "broken", "--out", "net.onnx"], "broken/m1.safetensors: SHA-256 is "
    yield ["export", "pool", "--out", "net.onnx"], "pool/manifest.json: names no mix of the pool"
    yield ["models", "broken"], "m1.safetensors: SHA-256"
    yield ["models", member, again], "again.safetensors: the same network"
    yield ["train", "no-such-recipe", "--out", "t"], "no-such-recipe"
    yield ["train", "mnist-0.1", "--out", "t", "--data", "none.npz"], "no images"
    yield ["train", "mnist-0.1", "--out", "t", "--data", "mnist-small", "--epochs", "0"], "epochs=0"
    yield ["train", "mnist-0.1", "--out", "t", "--data", "mnist-small", "--limit", "0"], "take(0)"
    yield ["train", "mnist-0.1", "--out", "t", "--data", "mnist-small", "--device", "abacus"], "abacus"
    yield ["train", "notes.txt", "--out", "t"], "notes.txt"
    yield ["train", "mnist-0.1", "--out", "notes.txt/t"], "cannot be written"
    yield ["bounds", "pool", *good], "--store is missing"
    yield ["bounds", "--store", "s"], "no networks"
    store = ["bounds", "pool", "--store", "s"]
    yield ["bounds", "missing", "--store", "s", *good], "missing"
    yield ["bounds", "broken", "--store", "s", *good], "m1.safetensors: SHA-256"
    yield ["bounds", member, again, "--store", "s", *good, "--eps", "0.1"], "again.safetensors: the same network"
    yield ["bounds", member, other, "--store", "s", *good, "--eps", "0.1"], "one shape for all members"
    yield store, "--data is missing"
    yield [*store, "--data", "wrong-labels.npz"], "labels reach"
    yield [*store, "--data", "wrong-shape.npz"], "images are"
    yield [*store, "--data", "none.npz"], "no images"
    yield [*store, *good, "--bounds", "magic"], "method='magic'"
    yield [*store, *good, "--precision", "float8"], "float8"
    yield [*store, *good, "--storage", "int3"], "int3"
    yield [*store, *good, "--memory", "much"], "--memory much"
    yield [*store, *good, "--screen", "all"], "--screen all"
    yield ["bounds", "pool", "--store", f"{notes}s", *good], "notes.txt"
    yield ["bounds", "--store", "no-store", "--verify"], "no-store"
    yield ["bench", "--images", "0"], "--images 0"
    yield ["bench", "--architecture", "Z"], "cannot read"
    yield ["bench", "--device", "abacus"], "device 'abacus'"
    yield ["models", "missing"], "missing"
    yield ["data", "--colour", "blue"], "--colour"
    yield ["demo", "--out", "notes.txt/x"], "cannot be written"
    yield ["dance"], "dance"


def test_everything_wrong_is_one_line_and_exit_code_2(tiny, capsys, monkeypatch):
    monkeypatch.setenv("ROBBOOST_DATA", str(tiny))
    before, surprises = None, []
    for arguments, message in wrong_inputs(tiny):
        before = before or sorted(path.name for path in tiny.iterdir())
        code, output = call(*arguments), capsys.readouterr()
        lines = [line for line in output.err.splitlines() if not line.endswith(" steps")]
        if code != 2 or len(lines) != 1 or message not in lines[0] or output.out:
            surprises.append((arguments, message, code, lines, output.out))
    assert not surprises, "\n".join(map(str, surprises))
    assert sorted(path.name for path in tiny.iterdir()) == before  # nothing half-done is left behind


def test_full_disk(tiny, capsys, monkeypatch):
    def full(*_arguments, **_keywords):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(Path, "write_text", full)
    data = ["--data", "test.npz", "--bounds", "ibp"]
    for arguments in (
        ["fit", "pool", *data],
        ["compare", "pool", *data, "--fit-data", "fit.npz", "--steps", 0, "--save", "x.json"],
        ["report", "pool", *data, "--fit-data", "fit.npz", "--steps", 0],
    ):
        assert call(*arguments) == 2
        assert "No space left on device" in capsys.readouterr().err
    assert not list(tiny.glob("*.part"))


def test_a_limit_on_file_size_is_a_full_disk_for_real(tiny, capsys):
    """No function is replaced: the system refuses every file above a kilobyte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    files = sorted(path.name for path in tiny.rglob("*"))
    data = ["--data", "test.npz"]
    commands = (
        ["fit", "pool", *data, "--bounds", "ibp"],
        ["attack", "pool/m0.safetensors", *data, "--eps", "0.1", "--steps", 1, "--out", "points.npz"],
        ["compare", "pool", *data, "--fit-data", "fit.npz", "--bounds", "ibp", "--steps", 0, "--save", "x.json"],
        ["export", "pool/m1.safetensors", "--out", "net.onnx"],
        ["bounds", "pool", *data, "--store", "store", "--bounds", "ibp"],
    )
    for arguments in commands:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            code = call(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        errors = capsys.readouterr().err
        assert code == 2, (arguments, errors)
        assert "File too large" in errors or "file size limit reached" in errors, (arguments, errors)
        assert "Traceback" not in errors
        shutil.rmtree("store", ignore_errors=True)
        assert sorted(path.name for path in tiny.rglob("*")) == files, arguments


def test_fitting_on_training_images_says_why_it_may_mislead(tiny, capsys, monkeypatch):
    monkeypatch.setattr("robboost.cli.ensembles.open_data", lambda *_: robboost.load_dataset("fit.npz"))
    assert call("fit", "pool", "--split", "train", "--bounds", "ibp") == 0
    assert "the most overfitted of them looks best" in capsys.readouterr().err


def test_completion_of_the_shell(tmp_path):
    words = {"_ROBBOOST_COMPLETE": "complete_bash", "COMP_WORDS": "robboost c", "COMP_CWORD": "1"}
    program = "import sys; sys.argv = ['robboost']; from robboost.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program], env={**environment(tmp_path), **words}, capture_output=True, text=True
    )
    assert {"certify", "compare"} <= set(result.stdout.split())
    assert "--install-completion" in run(tmp_path, "--help").stdout


def test_an_interrupted_comparison_continues_and_is_the_same(tiny, capsys, monkeypatch):
    """Ctrl-C in the attack: what was bounded and attacked before is there when the same command comes again."""
    command = ["compare", "pool", "--data", "test.npz", "--fit-data", "fit.npz", "--bounds", "ibp", "--steps", 2,
               "--restarts", 1, "--json"]  # fmt: skip
    real, count = robboost.comparison.attack, []

    def stopping(*arguments, **keywords):
        count.append(1)
        if len(count) == 4:
            raise KeyboardInterrupt
        return real(*arguments, **keywords)

    monkeypatch.setattr("robboost.comparison.attack", stopping)
    assert call(*command) == 130
    assert "given again, continues" in capsys.readouterr().err
    monkeypatch.setattr("robboost.comparison.attack", real)
    bound, bounded = robboost.mixtures.margin_bounds, []
    monkeypatch.setattr("robboost.mixtures.margin_bounds", lambda *a, **k: bounded.append(1) or bound(*a, **k))
    assert call(*command) == 0
    output = capsys.readouterr()
    continued, first = json.loads(output.out), len(bounded)
    assert "parts of an interrupted run are there" in output.err
    assert call(*command) == 0
    afresh = json.loads(capsys.readouterr().out)
    assert len(bounded) - first == first + 6  # three members on the fit images, three on the test images
    assert continued["rows"] == afresh["rows"]
    assert continued["robboost"]["weights"] == afresh["robboost"]["weights"]


def test_a_contradiction_is_exit_code_1(tiny, capsys, monkeypatch):
    def contradict(*_arguments, **_keywords):
        raise SoundnessError("a proof was broken")

    monkeypatch.setattr("robboost.cli.ensembles.certify", contradict)
    assert call("certify", "pool/m0.safetensors", "--data", "test.npz", "--eps", "0.1") == 1
    assert "INTERNAL CONTRADICTION: a proof was broken" in capsys.readouterr().err


def test_a_swallowed_ctrl_c_is_raised_again():
    from robboost.cli.interruption import insisting

    def swallow() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        time.sleep(10)

    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt), insisting(again=0.1):
        swallow()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_ctrl_c_says_so_and_training_continues(tmp_path):
    recipe = {
        "name": "long",
        "dataset": "mnist-small",
        "defaults": {"architecture": "conv 4 4x4/2, fc 32", "epochs": 10000, "batch": 100},
        "members": [{"seed": 0}],
    }
    (tmp_path / "long.json").write_text(json.dumps(recipe))
    command = [
        sys.executable,
        "-m",
        "robboost",
        "train",
        "long.json",
        "--out",
        "t",
        "--limit",
        "500",
        "--device",
        "cpu",
    ]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 240
    while not list((tmp_path / "t").glob("*.state")) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    state = torch.load(next((tmp_path / "t").glob("*.state")), weights_only=True)
    done = int(state["state"]["step_count"])
    assert done > 0
    again = run(tmp_path, "train", "long.json", "--out", "t", "--limit", 500, "--device", "cpu", "--minutes", "0.02")
    assert again.returncode == 0, again.stderr
    state = torch.load(next((tmp_path / "t").glob("*.state")), weights_only=True)
    assert int(state["state"]["step_count"]) >= done
