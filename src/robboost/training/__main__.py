"""`python -m robboost.training POOL ... --out DIR --minutes M`: trains pools side by side (needs torch and numpy)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from robboost.data import load_dataset
from robboost.errors import RobBoostError
from robboost.training.config import PoolConfig, load_pool
from robboost.training.evaluation import uniform_error
from robboost.training.manifest import save_pool
from robboost.training.pool import Progress, RunOptions, Trained, train_pool

# What a data set gets after others have taken all the time: enough for an epoch to start.
_LEAST_MINUTES = 0.01


def main(arguments: list[str] | None = None) -> int:
    """Trains the pools, those of one data set together, and prints a table; 0: done, 2: wrong input."""
    parser = argparse.ArgumentParser(prog="python -m robboost.training", description=__doc__)
    parser.add_argument("pools", nargs="+", help="pool files (.toml, .json) or names of shipped recipes")
    parser.add_argument("--out", type=Path, required=True, help="folder for members, logs and states")
    parser.add_argument("--minutes", type=float, help="time limit for all pools together")
    parser.add_argument("--epochs", type=int, help="epochs of every member, in place of the file's")
    parser.add_argument("--limit", type=int, help="use only so many training and held-out images")
    parser.add_argument("--device", help="cpu, cuda, ...; default: the GPU where there is one")
    parser.add_argument("--streams", type=int, default=RunOptions.streams, help="members that the GPU works on at once")
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except RobBoostError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    pools = [load_pool(name) for name in options.pools]
    if options.epochs is not None:
        pools = [replace(p, members=tuple(m.with_epochs(options.epochs) for m in p.members)) for p in pools]
    # Says now, and not after the data have been read, what is wrong with them.
    _ = RunOptions(device=options.device, minutes=options.minutes, streams=options.streams).chosen_device
    names = sorted({pool.dataset for pool in pools})
    start = time.monotonic()
    for position, name in enumerate(names):
        minutes = None
        if options.minutes is not None:
            minutes = (options.minutes - (time.monotonic() - start) / 60) / (len(names) - position)
            minutes = max(minutes, _LEAST_MINUTES)
        chosen = [pool for pool in pools if pool.dataset == name]
        run = RunOptions(out=options.out, device=options.device, minutes=minutes, streams=options.streams)
        data, heldout = (load_dataset(name, split=split).at_most(options.limit) for split in ("train", "heldout"))
        members = [config for pool in chosen for config in pool.members]
        trained = train_pool(members, data, heldout=heldout, options=run, progress=_say)
        _write_figures(chosen, trained, options.out)
        for pool in chosen:
            mine = [member for member in trained if member.config.pool == pool.name]
            save_pool(options.out / pool.name, mine, data, entries={"eps": mine[0].config.eps})


def _say(progress: Progress) -> None:
    kind = "estimate" if progress.estimated else "robust"
    sys.stdout.write(
        f"{progress.member:32s} epoch {progress.epoch:3d}/{progress.epochs} loss {progress.loss:7.4f}"
        f" {kind} {progress.robust:6.3f} {progress.seconds:6.0f} s, {progress.seconds_left:.0f} s left\n"
    )
    sys.stdout.flush()


def _write_figures(pools: list[PoolConfig], trained: list[Trained], out: Path) -> None:
    """DIR/POOL/figures.json for each pool, and the table."""
    lines = [f"{'held-out error, %':34s} epochs  clean    ibp  crown   best  same-slope"]
    for pool in pools:
        mine = [member for member in trained if member.config.pool == pool.name]
        entries = {}
        for member in mine:
            assert member.figures is not None
            errors = member.figures.errors()
            entries[member.config.label] = {**errors, "epochs": member.config.epochs, "diverged": member.diverged}
            numbers = "".join(f"{100 * value:7.2f}" for value in errors.values())
            lines.append(
                f"{member.config.label:34s} {member.config.epochs:6d}{numbers}{'  DIVERGED' * member.diverged}"
            )
        margins = [m.figures.margins for m in mine if m.figures is not None and not m.diverged]
        if margins:
            uniform = uniform_error(margins)
            entries["uniform"] = {"verified_error": uniform}
            lines.append(f"{pool.name + ': uniform, margins only':34s} {'':6s}{'':21s}{100 * uniform:7.2f}")
        folder = out / pool.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "figures.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
