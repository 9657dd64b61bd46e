"""Two and four gloo processes give what one gives; a dead one ends the job with a message, and a rerun continues."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from process_groups import run_processes, run_ranks
from small_stores import THREAT, examples, filled, fingerprint, pool, settings

import robboost as rb
from robboost.attacks import AttackSettings
from robboost.distributed import ALONE, Processes, joined, shared_examples
from robboost.errors import DistributedError, InputError, StoreError
from robboost.store import BoundStore, StoredColumns, fill_store
from robboost.weights import HeldSlopes, margins, solve, streamed_problem, weight_problem
from robboost.weights.oracle import checked_pass

SIZES = [2, 4]


def test_parts_cover_everything_once():
    for size in (1, 2, 3, 7):
        for count in (0, 1, 5, 23):
            for multiple in (1, 4):
                parts = [Processes(r, size).part(count, multiple=multiple) for r in range(size)]
                assert [i for p in parts for i in range(count)[p]] == list(range(count))
                assert all(p.start % multiple == 0 or p.start == count for p in parts)
    with pytest.raises(InputError, match="multiple=0"):
        ALONE.part(3, multiple=0)


def test_one_process_needs_nothing():
    with joined() as processes:
        assert processes == ALONE
        processes.barrier()
        values = torch.arange(3.0)
        assert processes.sum(values) is values
        assert processes.gather(values) is values


@pytest.mark.parametrize("size", SIZES)
def test_sums_and_rows(size):
    def work(processes: Processes):
        rows = torch.full((processes.rank * 2, 3), float(processes.rank))
        return (
            processes.sum(torch.tensor([1.0, processes.rank], dtype=torch.float64)),
            processes.gather(rows),
            processes.gather(torch.tensor([processes.rank % 2 == 0])),
            processes.gather(torch.zeros(0, 2)),
        )

    expected = torch.cat([torch.full((2 * r, 3), float(r)) for r in range(size)])
    for total, rows, flags, none in run_processes(size, work):
        assert total.tolist() == [size, size * (size - 1) / 2]
        assert torch.equal(rows, expected)
        assert flags.tolist() == [r % 2 == 0 for r in range(size)]
        assert none.shape == (0, 2)


@pytest.mark.parametrize("size", SIZES)
def test_bounds_certification_and_attack_equal_one_process(size):
    x, y = examples(16)
    ensemble = rb.Ensemble(pool(), (0.2, 0.3, 0.5), (1.0, 2.0, 1.0))
    strength = AttackSettings(steps=5, restarts=2, batch_size=2)
    computations = {
        "bounds": (lambda a, b: rb.margin_bounds(pool()[0], a, b, THREAT, "crown"), 1),
        "certificate": (lambda a, b: rb.certify(ensemble, a, b, THREAT, method="crown"), 1),
        "attack": (lambda a, b: rb.attack(ensemble, a, b, THREAT, settings=strength), 2),
    }
    alone = {name: shared_examples(ALONE, (x, y), f, multiple=m) for name, (f, m) in computations.items()}

    def work(processes: Processes):
        return {name: shared_examples(processes, (x, y), f, multiple=m) for name, (f, m) in computations.items()}

    for found in run_processes(size, work):
        assert not isinstance(found, Exception), found
        # Float32 bounds of batches of another size differ in the last digits: 1e-6 of the sums' size.
        for part in ("slope", "intercept", "lower"):
            assert torch.allclose(getattr(found["bounds"], part), getattr(alone["bounds"], part), atol=2e-6)
        assert torch.allclose(found["certificate"].margins, alone["certificate"].margins, atol=2e-6)
        assert torch.equal(found["certificate"].certified, alone["certificate"].certified)
        assert found["certificate"].rechecked == alone["certificate"].rechecked
        assert found["certificate"].verified_error == alone["certificate"].verified_error
        # Batches of the attack are the same, and seeded by their content: equal to the bit.
        assert torch.equal(found["attack"].adversarial, alone["attack"].adversarial)
        assert torch.equal(found["attack"].margins, alone["attack"].margins)
    assert 0 < int(alone["certificate"].certified.sum()) < 16


@pytest.mark.parametrize("size", SIZES)
def test_oracle_margins_and_solution_equal_one_process(size):
    generator = torch.Generator().manual_seed(0)
    slopes = 0.2 * torch.randn(5, 203, 8, generator=generator)
    c = torch.rand(5, 203, generator=generator, dtype=torch.float64) + 0.3
    alone = weight_problem(slopes, c, 1.0)
    a = torch.tensor([0.1, 0.1, 0.2, 0.2, 0.4], dtype=torch.float64)

    def work(processes: Processes):
        part = processes.part(203)
        problem = streamed_problem(HeldSlopes(slopes[:, part]), c[:, part], processes=processes)
        found = checked_pass(problem, a, 0.01)
        return found.norms, found.slopes, margins(problem, a), solve(problem)

    expected, solution = checked_pass(alone, a, 0.01), solve(alone)
    results = run_processes(size, work)
    for norms, minorants, margin, found in results:
        assert torch.allclose(norms, expected.norms, rtol=1e-14)
        assert torch.allclose(minorants, expected.slopes, rtol=1e-13, atol=1e-15)
        assert torch.allclose(margin, margins(alone, a), rtol=1e-13)
        assert found.objective == pytest.approx(solution.objective, rel=2e-6)
        assert found.gap <= 1e-6
        # Every process holds the very same weights.
        assert found.weights == results[0][3].weights
    assert solution.gap <= 1e-6


@pytest.mark.parametrize("size", SIZES)
def test_a_store_filled_and_solved_by_several_is_that_of_one(tmp_path, size):
    alone = filled(tmp_path / "alone")
    expected = solve(streamed_problem(StoredColumns(alone), alone.intercepts(), kappa=0.2))

    def work(processes: Processes):
        store = fill_store(
            str(tmp_path / "shared"), pool(), examples(), THREAT, settings=settings(), processes=processes
        )
        stream = StoredColumns(store, processes=processes)
        return solve(streamed_problem(stream, stream.intercepts(), kappa=0.2, processes=processes))

    for solution in run_processes(size, work):
        assert not isinstance(solution, Exception), solution
        assert solution.objective == pytest.approx(expected.objective, rel=2e-6)
    assert fingerprint(tmp_path / "shared") == fingerprint(tmp_path / "alone")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_job_and_a_rerun_continues(tmp_path, victim):
    filled(tmp_path / "alone")

    def work(processes: Processes):
        from robboost.store.disk import Disk

        honest, left = Disk.write, iter(range(4))

        def write(self, *arguments):
            honest(self, *arguments)
            if processes.rank == victim and next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        Disk.write = write
        fill_store(str(tmp_path / "s"), pool(), examples(), THREAT, settings=settings(), processes=processes)

    results = run_processes(2, work)
    assert results[victim] is None
    assert isinstance(results[1 - victim], DistributedError)
    assert "another process ended or is out of reach" in str(results[1 - victim])
    assert "run the same command again" in str(results[1 - victim])
    store = BoundStore.open(str(tmp_path / "s"))
    assert 0 < len(store.missing()) < 15
    # What is there is whole.
    for member, shard in store.complete():
        store.read(member, shard)
    assert run_processes(2, lambda p: fill_store(
        str(tmp_path / "s"), pool(), examples(), THREAT, settings=settings(), processes=p
    ).url) == [str(tmp_path / "s")] * 2  # fmt: skip
    assert fingerprint(tmp_path / "s") == fingerprint(tmp_path / "alone")


def test_a_mistake_on_the_first_process_ends_the_others(tmp_path):
    filled(tmp_path / "s")

    def work(processes: Processes):
        fill_store(str(tmp_path / "s"), pool(seed=9), examples(), THREAT, settings=settings(), processes=processes)

    first, second = run_processes(2, work)
    assert isinstance(first, StoreError)
    assert "member 0 is" in str(first)
    assert isinstance(second, DistributedError)


def test_more_processes_than_batches_are_refused():
    with pytest.raises(InputError, match="30 examples in batches of 16 for 4 processes"):
        shared_examples(Processes(0, 4), examples(), lambda a, b: a, multiple=16)


def test_results_without_rows_are_refused():
    found = run_processes(2, lambda p: shared_examples(p, examples(), lambda a, b: a))
    assert all(isinstance(f, InputError) and "expected a dataclass of rows" in str(f) for f in found)


def test_joining_without_a_meeting_point_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DistributedError, match=r"process 1 of 2 cannot join.*torchrun"), joined():
        pass


def test_a_single_process_takes_the_device_that_is_asked(monkeypatch):
    with joined(device="meta") as processes:
        assert processes == Processes(device=torch.device("meta"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with joined(device="auto") as processes:
        assert processes.device.type == "cuda"
    for wrong in ("gpu", "cuda:77"):
        with pytest.raises(InputError, match=f"device '{wrong}': cannot be used here"), joined(device=wrong):
            pass


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "2")):
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(DistributedError, match=r"process 3 of 4 is number 2 .from 0. on a machine with 2 GPUs"),
        joined(),
    ):
        pass


def test_under_torchrun_a_killed_process_ends_the_job_and_a_rerun_continues(tmp_path):
    """The real launcher, two processes, one script: the second process is killed after some writes."""
    here = Path(__file__).parent
    script = tmp_path / "job.py"
    script.write_text(
        "import os, signal, sys\n"
        "from small_stores import THREAT, examples, pool, settings\n"
        "from robboost.distributed import joined\n"
        "from robboost.store import fill_store\n"
        "from robboost.store.disk import Disk\n"
        "with joined() as processes:\n"
        "    assert processes.size == 2\n"
        "    honest, left = Disk.write, iter(range(7))\n"
        "    def write(self, *arguments):\n"
        "        honest(self, *arguments)\n"
        "        if processes.rank == 1 and next(left, None) is None:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "    Disk.write = write\n"
        "    fill_store(sys.argv[1], pool(), examples(), THREAT, settings=settings(), processes=processes)\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent / "src")])}

    killed = subprocess.run(
        [*launcher, str(tmp_path / "s")], env=environment, check=False, capture_output=True, text=True, timeout=300
    )
    assert killed.returncode != 0
    assert "Signal 9 (SIGKILL)" in killed.stderr
    store = BoundStore.open(str(tmp_path / "s"))
    assert 0 < len(store.missing()) < 15
    for member, shard in store.complete():
        store.read(member, shard)
    # The launcher is slow to start; two processes without it do for the rerun.
    again = run_processes(2, lambda job: fill_store(
        str(tmp_path / "s"), pool(), examples(), THREAT, settings=settings(), processes=job
    ).missing())  # fmt: skip
    assert again == [[], []]
    filled(tmp_path / "alone")
    assert fingerprint(tmp_path / "s") == fingerprint(tmp_path / "alone")


def test_commands_share_the_work_and_print_one_result(tmp_path, monkeypatch):
    """certify and attack under several processes print, once, what one process prints."""
    import contextlib
    import io
    import json

    from robboost.cli import main

    network = sorted((Path(rb.__file__).parent / "models" / "demo_pool").glob("*.safetensors"))[0]
    asked = [str(network), "--data", "mnist-small", "--limit", "21", "--eps", "0.1", "--json"]

    def command(*arguments: str) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as end:
            main([arguments[0], *asked, *arguments[1:]])
        assert end.value.code == 0
        return printed.getvalue()

    def without_resources(text: str) -> dict:
        values = json.loads(text)
        del values["resources"]
        return values

    certify = ("certify", "--bounds", "ibp")
    alone = without_resources(command(*certify))
    first, second = run_ranks(2, lambda: command(*certify))
    assert second == ""
    assert without_resources(first) == alone
    monkeypatch.setattr(AttackSettings, "batch_size", 8)
    monkeypatch.setattr(AttackSettings.__init__, "__defaults__", _defaults(batch_size=8))
    attack = ("attack", "--steps", "3")
    alone = without_resources(command(*attack))
    first, second = run_ranks(2, lambda: command(*attack))
    assert second == ""
    assert without_resources(first) == alone


def _defaults(**changes: object) -> tuple[object, ...]:
    import dataclasses

    return tuple(changes.get(f.name, f.default) for f in dataclasses.fields(AttackSettings))
