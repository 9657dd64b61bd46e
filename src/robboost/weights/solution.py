"""What a solver returns, and when it stops."""

from __future__ import annotations

import html
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from robboost.errors import InputError

__all__ = ["Method", "Progress", "Solution", "SolverSettings", "Status", "relative_gap"]

Method = Literal["auto", "coordinate", "uniform"]
Status = Literal["optimal", "pass-limit", "time-limit", "stalled", "not-optimised"]


@dataclass(frozen=True)
class SolverSettings:
    """When to stop, and on what to run.

    Attributes:
        gap: relative gap at which `auto` stops, as in `Solution.gap`.
        max_passes: limit on passes over the slopes, including those of the proof (one of each is made in any case).
        max_seconds: limit on wall-clock time; the pass under way and the proof are finished.
        threads: CPU threads of the compiled kernel.
        eliminate: pairs that are left out first, for one more pass: "none"; "exact", those that cost nothing under any
            mix (the solution is that of all pairs); "paper", also those that all members or no member certifies
            (section 4), which makes it another problem: loss, bound and gap are then those of the remaining pairs.
        epochs: `coordinate`: sweeps over the members.
        order: `coordinate`: "random" (the paper's) or "cyclic".
        seed: `coordinate`: seed of the random order.
    """

    gap: float = 1e-6
    max_passes: int = 100
    max_seconds: float = math.inf
    threads: int = 1
    eliminate: Literal["none", "exact", "paper"] = "none"
    epochs: int = 3
    order: Literal["random", "cyclic"] = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.gap < 1:
            raise InputError(f"gap={self.gap}: expected at least 0 and below 1")
        for name in ("max_passes", "threads", "epochs"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: expected at least 1")
        if not self.max_seconds > 0:
            raise InputError(f"max_seconds={self.max_seconds}: expected above 0")
        if self.eliminate not in ("none", "exact", "paper"):
            raise InputError(f"eliminate={self.eliminate!r}: expected 'none', 'exact' or 'paper'")
        if self.order not in ("random", "cyclic"):
            raise InputError(f"order={self.order!r}: expected 'random' or 'cyclic'")


@dataclass(frozen=True)
class Progress:
    """One line of a solver's history: best objective and bound after so many passes and seconds."""

    passes: float
    seconds: float
    objective: float
    lower_bound: float


_STEP = tuple(Progress.__dataclass_fields__)


@dataclass(frozen=True)
class Solution:
    """Weights, and the proof of how good they are.

    `objective` is the loss of `weights` (equation 8) and `lower_bound <= min g` bounds the loss of every mix; both are
    recomputed in float64 from the arrays that were handed in, outside the solver. The bound is a theorem about those
    arrays up to float64 rounding, which is subtracted; it says nothing about images outside them.

    Attributes:
        weights: [T], none negative, sum 1; of the members as they were handed in.
        gap: `(objective - lower_bound) / objective`; relative to a thousandth of kappa a pair where the loss is less.
        status: "optimal" (gap reached), "pass-limit", "time-limit", "stalled" (no further progress in float64; for
            `coordinate`: the sweeps are done), or "not-optimised" (uniform).
        passes: how often the slopes were read, parts counted as fractions, the proof included.
        n_pairs: pairs of the problem that was solved; `eliminated` others were left out first (`SolverSettings`).
    """

    weights: tuple[float, ...]
    objective: float
    lower_bound: float
    gap: float
    status: Status
    passes: float
    seconds: float
    method: Method
    kappa: float
    norm: str
    n_pairs: int
    history: tuple[Progress, ...] = field(default=(), repr=False)
    eliminated: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A form of plain numbers, strings and lists."""
        return {
            "weights": list(self.weights),
            "objective": self.objective,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "status": self.status,
            "passes": self.passes,
            "seconds": self.seconds,
            "method": self.method,
            "kappa": self.kappa,
            "norm": self.norm,
            "n_pairs": self.n_pairs,
            "eliminated": self.eliminated,
            "history": [vars(step) for step in self.history],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Solution:
        """The inverse of `to_dict`."""
        try:
            fields = dict(values)
            fields["weights"] = tuple(float(w) for w in fields["weights"])
            fields["history"] = tuple(Progress(**step) for step in fields.get("history", ()))
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{error}: not the fields of a solution, so write it with to_dict") from None

    def to_json(self) -> str:
        """`to_dict` as JSON text; numbers survive the round trip exactly."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Solution:
        """The inverse of `to_json`."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise InputError(f"not JSON ({error}): expected the text that Solution.to_json wrote") from None
        if not isinstance(values, dict):
            raise InputError(f"JSON of type {type(values).__name__}: expected the text that Solution.to_json wrote")
        return cls.from_dict(values)

    def __str__(self) -> str:
        lines = [
            f"{self.method}: {self.status} after {self.passes:.4g} passes, {self.seconds:.3g} s",
            f"loss {self.objective:.8g} on {self.n_pairs} pairs (kappa {self.kappa:g}, {self.norm}), "
            f"no mix below {self.lower_bound:.8g}: gap {self.gap:.2g}",
        ]
        if self.eliminated:
            lines.append(f"{self.eliminated} of {self.n_pairs + self.eliminated} pairs were eliminated first")
        lines += [f"  member {t:>2}  {w:.4f}" for t, w in enumerate(self.weights) if w > 0]
        return "\n".join(lines)

    def to_numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Weights [T], and the history as columns, by name."""
        columns = {name: np.array([getattr(step, name) for step in self.history]) for name in _STEP}
        return {"weights": np.array(self.weights), **columns}

    def to_pandas(self) -> Any:
        """One row a member: its weight (needs pandas)."""
        import pandas as pd

        return pd.DataFrame({"weight": self.weights}, index=pd.RangeIndex(len(self.weights), name="member"))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def relative_gap(objective: float, lower_bound: float, scale: float) -> float:
    """`(objective - lower_bound) / max(objective, scale / 1000)`, where `scale` is what no margin at all would cost.

    The second term is for optima at or near zero, which no weights in floating point attain.
    """
    return max(0.0, objective - lower_bound) / max(objective, 1e-3 * scale)


def check_method(method: str) -> Method:
    """Refuses a method that does not exist."""
    if method not in get_args(Method):
        raise InputError(f"method={method!r}: expected one of {', '.join(map(repr, get_args(Method)))}")
    return method  # type: ignore[return-value]
