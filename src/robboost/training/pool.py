"""Many members trained side by side in one process.

A small network keeps a large GPU busy for microseconds at a time, so the launches cost more than the arithmetic. Each
member's whole step is recorded once as a CUDA graph and replayed with one launch, members taking turns over several
streams. On a CPU the same steps run one after another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from robboost.data import Dataset
from robboost.devices import usable_device
from robboost.errors import DivergedError, InputError
from robboost.training import files
from robboost.training.config import TrainConfig
from robboost.training.evaluation import QuickFigures, quick_figures
from robboost.training.member import DeviceData, Member
from robboost.training.precision import fast_training
from robboost.training.turns import Turns

__all__ = ["Progress", "RunOptions", "Trained", "train", "train_members", "train_pool"]


@dataclass(frozen=True)
class RunOptions:
    """Where and how long a run goes.

    Attributes:
        out: folder for members, logs and states; a run found there is resumed. None: nothing is written.
        device: "cpu", "cuda", ...; None: the GPU where there is one.
        minutes: time limit; epochs are then cut (for all members alike) to what a measured step allows.
        capture: record steps as CUDA graphs (on a GPU); False runs them one by one, with the same result.
        streams: how many members a GPU may work on at once.
        report_seconds: time between looks at the run: progress, divergence, files.
    """

    out: Path | None = None
    device: str | None = None
    minutes: float | None = None
    capture: bool = True
    streams: int = 8
    report_seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.out is not None:
            object.__setattr__(self, "out", Path(self.out))
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise InputError(f"minutes={self.minutes:g}: expected a finite number above 0")
        if self.streams < 1:
            raise InputError(f"streams={self.streams}: expected at least 1")

    @property
    def chosen_device(self) -> torch.device:
        return usable_device(self.device)


@dataclass(frozen=True)
class Progress:
    """What a progress callback is told about one member; estimated: `robust` rests on estimated bounds."""

    member: str
    epoch: int
    epochs: int
    loss: float
    robust: float
    seconds: float
    seconds_left: float
    estimated: bool = False


@dataclass(frozen=True)
class Trained:
    """A finished member: the network (normalisation folded, averaged weights), its log and its quick figures.

    `figures` is None without held-out images; `diverged` says that the member was given up: its network is of no use.
    """

    config: TrainConfig
    model: nn.Module
    history: list[dict[str, float]]
    figures: QuickFigures | None
    diverged: bool


def train(
    config: TrainConfig,
    data: Dataset,
    *,
    heldout: Dataset | None = None,
    options: RunOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Trained:
    """Trains one member; raises DivergedError where `train_pool` would drop it."""
    (member,) = train_pool([config], data, heldout=heldout, options=options, progress=progress)
    if member.diverged:
        raise DivergedError(
            f"{config.label}: the loss was not finite in epoch {len(member.history) + 1}; expected finite numbers:"
            " lower lr, or lengthen warmup and ramp"
        )
    return member


def train_pool(
    configs: Sequence[TrainConfig],
    data: Dataset,
    *,
    heldout: Dataset | None = None,
    options: RunOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Trained]:
    """Trains members side by side on `data` and measures them on `heldout`, which is never trained on.

    Members come back in the order of `configs`. One whose loss leaves the finite numbers is stopped and marked; the
    others go on.
    """
    options = options or RunOptions()
    labels = [config.label for config in configs]
    if not configs:
        raise InputError("configs=[]: expected at least one configuration")
    if len(set(labels)) < len(labels):
        raise InputError(f"configs: two members are called {max(labels, key=labels.count)!r}; expected different names")
    pad = max(config.shift for config in configs)
    shared = DeviceData.of(data.images, data.labels, pad=pad, classes=len(data.classes), device=options.chosen_device)
    members = [Member(config, shared) for config in configs]
    return train_members(members, heldout=heldout, options=options, progress=progress)


def train_members(
    members: Sequence[Member],
    *,
    heldout: Dataset | None = None,
    options: RunOptions,
    progress: Callable[[Progress], None] | None = None,
) -> list[Trained]:
    """`train_pool` for members that were set up before, such as those with a loss of their own."""
    with fast_training():
        run = _Run(list(members), options, heldout, progress)
        run.go()
    return [run.trained(member) for member in run.members]


class _Run:
    """The loop over epochs and steps, with its reports."""

    def __init__(
        self,
        members: list[Member],
        options: RunOptions,
        heldout: Dataset | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.members = members
        self.options = options
        self.heldout = heldout
        self.progress = progress
        self.diverged: set[str] = set()
        self.start = time.monotonic()
        self.last_report = self.start

    def go(self) -> None:
        resumed = self._resume()
        self.turns = Turns(self.members, streams=self.options.streams, capture=self.options.capture)
        if self.options.minutes is not None:
            self._fit_into_time(resumed)
        self.rate_start, self.rate_done = time.monotonic(), sum(self._done(m) for m in self.members)
        epochs = max(member.config.epochs for member in self.members)
        for epoch in range(min(self._done(m) for m in self.members), epochs):
            self._epoch([m for m in self.members if self._done(m) <= epoch < m.config.epochs], epoch)
            if not self._running():
                break
            last = epoch + 1 == epochs
            if last or time.monotonic() - self.last_report > self.options.report_seconds:
                self._report()
            if self._out_of_time():
                self._report()
                break

    def trained(self, member: Member) -> Trained:
        figures = None
        if self.heldout is not None:
            figures = quick_figures(member, self.heldout.images, self.heldout.labels)
        return Trained(
            member.config, member.network(), self._finite_history(member), figures, member.config.label in self.diverged
        )

    def _running(self) -> list[Member]:
        return [m for m in self.members if m.config.label not in self.diverged]

    def _done(self, member: Member) -> int:
        return self.finished[member.config.label]

    def _resume(self) -> list[Member]:
        """Restores the members whose state is in the output folder; `finished` counts their epochs."""
        self.finished = {m.config.label: 0 for m in self.members}
        resumed = []
        for member in self.members if self.options.out is not None else []:
            assert self.options.out is not None
            if (found := files.load_state(member.config, self.options.out)) is None:
                continue
            config, state = found
            member.shorten(config.epochs)
            member.restore(state)
            self.finished[config.label] = int(state["step_count"].item()) // member.steps_per_epoch
            resumed.append(member)
        return resumed

    def _epoch(self, members: list[Member], epoch: int) -> None:
        """One epoch of every member that has not diverged; members with fewer steps take their turns evenly."""
        members = [m for m in members if m.config.label not in self.diverged]
        for member in members:
            self.turns.begin_epoch(member, epoch)
        longest = max((m.steps_per_epoch for m in members), default=0)
        for turn in range(longest):
            for member in members:
                if (turn + 1) * member.steps_per_epoch // longest > turn * member.steps_per_epoch // longest:
                    self.turns.step(member)
        self.turns.end_epoch()
        for member in members:
            self.finished[member.config.label] = epoch + 1

    def _fit_into_time(self, resumed: list[Member]) -> None:
        """Cuts the epochs of members that start now to what fits, after timing a few turns (which are undone)."""
        assert self.options.minutes is not None
        # The schedule's table ends with the run: a short one cannot be timed beyond it.
        total = min(m.steps_per_epoch * m.config.epochs for m in self.members)
        turns = min(20, total, *(m.steps_per_epoch for m in self.members))
        practice = min(2, total - turns)
        before = [{name: tensor.clone() for name, tensor in m.state().items()} for m in self.members]
        for member in self.members:
            self.turns.begin_epoch(member, 0)
            member.step_count.zero_()
        self.turns.synchronize()  # the copies and zeros above are on another stream than the steps
        started = 0.0
        for turn in range(-practice, turns):
            if turn == 0:
                self.turns.synchronize()
                started = time.monotonic()
            for member in self.members:
                self.turns.step(member)
        self.turns.synchronize()
        turn_seconds = (time.monotonic() - started) / turns
        for member, state in zip(self.members, before, strict=True):
            member.restore(state)
        self.turns.synchronize()
        left = self.options.minutes * 60 - (time.monotonic() - self.start)
        epoch_seconds = turn_seconds * max(m.steps_per_epoch for m in self.members)
        # Reports, files and figures take their share.
        epochs = int(0.92 * left / epoch_seconds)
        for member in self.members:
            if member not in resumed:
                member.shorten(max(1, min(epochs, member.config.epochs)))

    def _out_of_time(self) -> bool:
        limit = self.options.minutes
        return limit is not None and time.monotonic() - self.start > limit * 60

    def _report(self) -> None:
        """Reads the log (the only wait of the loop), drops diverged members, writes files, tells the callback."""
        self.turns.synchronize()
        self.last_report = time.monotonic()
        self._drop_diverged()
        done = sum(self.finished.values()) - self.rate_done
        left = sum(m.config.epochs - self._done(m) for m in self._running())
        seconds = self.last_report - self.rate_start
        seconds_left = seconds / max(done, 1) * left
        for member in self._running():
            entries = files.history(member)
            if self.options.out is not None:
                files.save_member(member, self.options.out)
                files.save_history(entries, member.config, self.options.out)
                files.save_state(member, self.options.out)
            if self.progress is not None and entries:
                self.progress(
                    Progress(
                        member.config.label,
                        len(entries),
                        member.config.epochs,
                        entries[-1]["loss"],
                        entries[-1]["robust"],
                        self.last_report - self.start,
                        seconds_left,
                        member.config.estimated,
                    )
                )

    def _drop_diverged(self) -> None:
        for member in self._running():
            if not bool(member.log.isfinite().all()) or not bool(member.flat.isfinite().all()):
                self.diverged.add(member.config.label)

    def _finite_history(self, member: Member) -> list[dict[str, float]]:
        entries = files.history(member)
        finite = [all(math.isfinite(value) for value in entry.values()) for entry in entries]
        return entries[: finite.index(False)] if False in finite else entries
