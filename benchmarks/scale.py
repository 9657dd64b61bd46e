"""Bounds on disk: reading against memory-mapped safetensors, ten times the memory, and a fitted model of the cost.

    PYTHONPATH=src:tests python benchmarks/scale.py --folder /some/disk            # about 10 minutes, 8 GB of disk
    PYTHONPATH=src:tests python benchmarks/scale.py --folder /some/disk --quick    # about a minute, 0.5 GB

`--only read|memory|cost` runs one part. "cold": the files were dropped from the page cache before. Times are the least
of five, and every ratio is between times of this run. Stores are synthetic: their numbers cost the same to read.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from process_groups import run_processes
from safetensors import safe_open
from safetensors.torch import save_file
from scale_model import Run, fit_costs, on_paper
from small_stores import THREAT
from synthetic_stores import TARGETS, synthetic_store
from torch import nn

from robboost.distributed import Processes
from robboost.observability import profiled
from robboost.store import BoundStore, FillSettings, StoredColumns, fill_store
from robboost.weights import solve, streamed_problem
from robboost.weights.oracle import checked_pass

MEMBERS, DIM, REPEATS = 12, 784, 5


def drop(path: Path) -> None:
    """Drops the files below `path` from the page cache; dirty pages cannot be dropped, so they are written first."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def least(work: Callable[[], object], *, cold: Path | None = None, repeats: int = REPEATS) -> tuple[float, float]:
    """Wall clock and core seconds, each the least of the repeats."""
    times, cores = [], []
    for _ in range(repeats):
        if cold is not None:
            drop(cold)
        began, core = time.perf_counter(), time.process_time()
        work()
        times.append(time.perf_counter() - began)
        cores.append(time.process_time() - core)
    return min(times), min(cores)


def plain_read(folder: Path) -> None:
    """Every byte of the store's large files through `readinto`, one thread."""
    buffer = bytearray(4 * 2**20)
    for file in sorted((folder / "slopes" / "c").rglob("0")):
        if file.is_file():
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass


def read_store(store: BoundStore) -> None:
    for _ in StoredColumns(store).slabs():
        pass


def mapped(file: Path, slab: torch.Tensor) -> None:
    """Memory-mapped safetensors, copied piece by piece to memory that a solver could work on."""
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            values = tensors.get_tensor(name)
            for part in values.split(len(slab)):
                slab[: len(part)].copy_(part)


def mapped_sum(file: Path) -> None:
    """The same, touched in place: the least that any use costs."""
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            tensors.get_tensor(name).sum()


def compare_reading(folder: Path, pairs: int) -> None:
    store = synthetic_store(str(folder / "read"), MEMBERS, pairs, DIM)
    stream = StoredColumns(store)
    flat = folder / "flat.safetensors"
    save_file({f"member{t}": stream.take_members([t]).load()[0] for t in range(MEMBERS)}, flat)
    total, slab = stream.nbytes, torch.empty(32 * 2**20 // (DIM * 4), DIM)
    problem = streamed_problem(stream, stream.intercepts())
    mix = torch.full((MEMBERS,), 1 / MEMBERS, dtype=torch.float64)
    checked_pass(problem, mix, 0.01)
    rows: list[tuple[str, Callable[[], object], Path]] = [
        ("store, checksums verified", lambda: read_store(store), folder / "read"),
        ("safetensors, mapped and copied", lambda: mapped(flat, slab), flat),
        ("safetensors, mapped and summed", lambda: mapped_sum(flat), flat),
        ("plain read of the store's files", lambda: plain_read(folder / "read"), folder / "read"),
        ("the solver's pass over the store", lambda: checked_pass(problem, mix, 0.01), folder / "read"),
    ]
    print(f"\nOne full read of {total / 1e9:.2f} GB (T = {MEMBERS}, n = {pairs}, d = {DIM}, float32)")
    print(f"{'':<34} {'cold, s':>8} {'GB/s':>6} {'core s':>7} {'warm, s':>8} {'GB/s':>6} {'core s':>7}")
    found = {name: (float("inf"),) * 4 for name, _, _ in rows}
    # By turns, so that what else the machine does hits all rows.
    for _ in range(REPEATS):
        for name, work, path in rows:
            times = (*least(work, cold=path, repeats=1), *least(work, repeats=2))
            found[name] = tuple(map(min, found[name], times))
    for name, (cold, cold_core, warm, warm_core) in found.items():
        print(
            f"{name:<34} {cold:>8.3f} {total / cold / 1e9:>6.2f} {cold_core:>7.3f}"
            f" {warm:>8.3f} {total / warm / 1e9:>6.2f} {warm_core:>7.3f}"
        )
    ours, copied, summed, raw, solver = found.values()
    for i, state in enumerate(("cold", "cold, core seconds", "warm", "warm, core seconds")):
        print(
            f"{state}: store / safetensors copied {ours[i] / copied[i]:.2f}, summed {ours[i] / summed[i]:.2f} (wanted"
            f" from disk: at most 1.5), solver's pass / plain read {solver[i] / raw[i]:.2f}"
        )
    flat.unlink()
    shutil.rmtree(folder / "read")


def show_memory(folder: Path, limit: int, cgroup: Path | None) -> None:
    """Solves a store of ten times `limit` bytes in a child whose whole data segment may not exceed `limit`."""
    pairs = -(-10 * limit // (MEMBERS * DIM * 4) // TARGETS) * TARGETS
    store = synthetic_store(str(folder / "large"), MEMBERS, pairs, DIM)
    total = StoredColumns(store).nbytes
    # One malloc arena: those of other threads reserve memory that the limit counts and nobody uses.
    command = [sys.executable, __file__, "--limited", str(limit), "--folder", str(folder / "large")]
    if cgroup is not None:
        command += ["--cgroup", str(cgroup)]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    print(f"\n{total / 1e9:.2f} GB of bounds (n = {pairs}) in a process that may hold {limit / 1e6:.0f} MB", flush=True)
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if child.returncode:
        raise SystemExit(f"the limited process ended with {child.returncode}: {child.stderr[-2000:]}")
    found = json.loads(child.stdout)
    print(f"all in memory: {found['held']}")
    print(
        f"streamed: gap {found['gap']:.1e} in {found['passes']:.1f} passes, {found['seconds']:.1f} s; peak memory"
        f" {found['peak'] / 1e6:.0f} MB, data segment {found['data'] / 1e6:.0f} MB"
    )
    # Steps on a part of the pairs count as fractions of a pass, and are not read from disk again.
    print(
        f"solver's pass, cold: {found['first']:.2f} s = {total / found['first'] / 1e9:.2f} GB/s; plain cold read"
        f" {found['raw']:.2f} s = {total / found['raw'] / 1e9:.2f} GB/s; ratio {found['first'] / found['raw']:.2f}"
    )
    print(
        f"whole solve: read {found['read'] / 1e9:.1f} GB = {found['read'] / total:.2f} stores; waited for the disk"
        f" {found['waiting']:.1f} s of {found['seconds']:.1f}"
    )
    shutil.rmtree(folder / "large")


def limited(folder: Path, limit: int, cgroup: Path | None) -> None:
    """The child: sets its own limit, is refused the arrays, and solves the stream."""
    if cgroup is not None:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    stream = StoredColumns(BoundStore.open(str(folder)))
    try:
        stream.load()
        held = "fitted, so the limit shows nothing"
    except (MemoryError, RuntimeError) as error:
        held = f"refused ({str(error).splitlines()[0][:90]})"
    problem = streamed_problem(stream, stream.intercepts())
    mix = torch.full((MEMBERS,), 1 / MEMBERS, dtype=torch.float64)
    # Loads the compiled kernel, so that the timed pass is one.
    checked_pass(problem.take_pairs(torch.arange(200)), mix, 0.01)
    raw, first = [], []
    # By turns, so that what else the machine does hits both.
    for _ in range(3):
        raw.append(least(lambda: plain_read(folder), cold=folder, repeats=1)[0])
        first.append(least(lambda: checked_pass(problem, mix, 0.01), cold=folder, repeats=1)[0])
    before = bytes_read()
    with profiled() as profile:
        solution = solve(problem)
    print(json.dumps({
        "held": held, "raw": min(raw), "first": min(first), "seconds": profile.wall,
        "passes": solution.passes, "gap": solution.gap, "read": bytes_read() - before,
        "waiting": profile.seconds["waiting for the disk"],
        "peak": status("VmHWM"), "data": status("VmData"),
    }))  # fmt: skip


def bytes_read() -> int:
    """Bytes that this process asked the kernel for, from the disk or its cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


def status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[name].split()[0])


def measure(processes: Processes, url: str) -> dict[str, float]:
    """One process's share of a solve: pass, whole, bytes and growth of memory."""
    Path("/proc/self/clear_refs").write_text("5")
    base = status("VmRSS")
    stream = StoredColumns(BoundStore.open(url), processes=processes)
    problem = streamed_problem(stream, stream.intercepts(), processes=processes)
    mix = torch.full((problem.n_members,), 1 / problem.n_members, dtype=torch.float64)
    checked_pass(problem, mix, 0.01)
    one = min(core_seconds(lambda: checked_pass(problem, mix, 0.01))[0] for _ in range(REPEATS))
    before = bytes_read()
    with profiled() as profile:
        seconds, solution = core_seconds(lambda: solve(problem))
    return {
        "pass": one, "solve": seconds, "wall": profile.wall, "passes": solution.passes, "read": bytes_read() - before,
        "memory": status("VmHWM") - base,
    }  # fmt: skip


def core_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of all threads of this process, which other work on the machine hardly changes."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def fill_seconds(url: str, members: int, images: int, dim: int, processes: int) -> float:
    torch.manual_seed(0)
    pool: list[nn.Module] = [
        nn.Sequential(nn.Linear(dim, 100), nn.ReLU(), nn.Linear(100, TARGETS + 1)).eval() for _ in range(members)
    ]
    data = torch.rand(images, dim), torch.randint(TARGETS + 1, (images,))

    def work(job: Processes) -> float:
        # Files small enough that every process has some.
        settings = FillSettings(method="crown-ibp", shard_bytes=4 * 2**20)
        return core_seconds(lambda: fill_store(url, pool, data, THREAT, settings=settings, processes=job))[0]

    found = run_processes(processes, work, timeout=600)
    shutil.rmtree(url)
    return max(found)


def measure_costs(folder: Path, quick: bool) -> None:
    unit = 9_000 if quick else 27_000
    grid = [(6, unit, 784, 1), (6, 2 * unit, 784, 1), (6, unit, 196, 1), (6, unit, 1568, 1), (3, unit, 784, 1),
            (12, unit, 784, 1), (6, 2 * unit, 784, 2), (12, unit, 784, 2), (6, 2 * unit, 784, 4)]  # fmt: skip
    runs = []
    print(
        f"\nCost, files in the page cache; {os.cpu_count()} cores; bounds: crown-ibp of an MLP d-100-10 (n / 3 pairs)"
    )
    print("Seconds are core seconds of the busiest process, but for the wall clock of the solve.")
    print(f"{'T':>3} {'n':>6} {'d':>5} {'procs':>5} {'store, MB':>9} {'fill, s':>8} {'pass, s':>8} {'solve, s':>8}"
          f" {'wall, s':>7} {'passes':>6} {'read, MB':>9} {'memory, MB':>10}")  # fmt: skip
    for members, pairs, dim, processes in grid:
        url = str(folder / "cost")
        fill = fill_seconds(url, members, pairs // TARGETS // 3, dim, processes)
        synthetic_store(url, members, pairs, dim, shard_bytes=16 * 2**20)
        found = run_processes(processes, lambda job, url=url: measure(job, url), timeout=600)
        shutil.rmtree(url)
        for result in found:
            if not isinstance(result, dict):
                raise SystemExit(f"a process ended with {result!r}")
        worst = {name: max(result[name] for result in found) for name in found[0]}
        run = Run(members, pairs, dim, processes, fill=fill, fill_pairs=pairs // TARGETS // 3 * TARGETS,
                  one_pass=worst["pass"], solve=worst["solve"], passes=worst["passes"],
                  read=float(np.sum([r["read"] for r in found])), memory=worst["memory"])  # fmt: skip
        runs.append(run)
        print(f"{members:>3} {pairs:>6} {dim:>5} {processes:>5} {run.bytes / 1e6:>9.0f} {fill:>8.2f}"
              f" {run.one_pass:>8.3f} {run.solve:>8.2f} {worst['wall']:>7.2f} {run.passes:>6.1f} {run.read / 1e6:>9.0f}"
              f" {run.memory / 1e6:>10.0f}", flush=True)  # fmt: skip
    costs = fit_costs(runs)
    print(costs)
    print(on_paper(costs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="an empty place on the disk to be measured")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=["read", "memory", "cost"])
    parser.add_argument("--cgroup", type=Path, help="a memory cgroup (with its limit set) that the child joins")
    parser.add_argument("--limited", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.limited:
        limited(chosen.folder, chosen.limited, chosen.cgroup)
        return
    folder = chosen.folder / f"robboost-scale-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        if chosen.only in (None, "read"):
            compare_reading(folder, 9_000 if chosen.quick else 27_000)
        if chosen.only in (None, "memory"):
            # An interpreter with PyTorch and Numba takes 210 MB of it before the first bound.
            show_memory(folder, (640 if chosen.quick else 800) * 10**6, chosen.cgroup)
        if chosen.only in (None, "cost"):
            measure_costs(folder, chosen.quick)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
