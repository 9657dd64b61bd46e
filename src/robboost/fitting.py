"""From a pool of trained networks to the ensemble with the best proof: `RobBoost.fit`."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robboost.errors import InputError
from robboost.inputs import check_pool
from robboost.journal import remembered
from robboost.mixtures import Members, PoolBounds, Progress, named, pool_bounds
from robboost.models import Ensemble
from robboost.models.architectures import float32_bytes
from robboost.observability import span
from robboost.selection import Candidate, Limits, Selection
from robboost.stored import StoredBounds
from robboost.threat import Threat
from robboost.weights import Solution

__all__ = ["RobBoost"]

# At 1 the paper's loss; the smaller, the nearer to counting errors (and the less it rewards margins already won).
_KAPPAS = (1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.03)
_PARAMETERS = ("threat", "kappa", "method", "bounds", "max_members", "max_megabytes")


class RobBoost:
    """Finds the weights of the ensemble F = sum_t a_t f_t / Z_t with the best certificate (paper, section 3).

    Minimises sum_n max(0, kappa - M_n(a)) over the simplex (equation 8) to a proved gap, for several kappa, and keeps
    the mix with the lowest verified error on a validation part of the fit images. The best single member and the
    uniform average are candidates too: on that part the result is never worse than they are.

    Fit on images that the members were not trained on: on training images the most overfitted member looks best, and
    wins weight that it does not deserve.

    Args:
        threat: the set of attacks.
        kappa: margin at which a pair is safe enough (the paper: 1), or "auto": chosen on the validation part.
        method: of `solve_weights`: "auto" (the proved optimum), "coordinate" (the paper's descent) or "uniform".
        bounds: method of the members' bounds, see `certify`.
        max_members: at most so many members with weight.
        max_megabytes: at most so many 1e6 bytes of float32 parameters in the ensemble.

    After `fit`:
        ensemble: the `Ensemble` of the members that have weight.
        weights: float64 [T]; scales: the Z_t, float64 [T]; names: of the members.
        solution: of the solver, with objective, lower bound and gap, for `kappa_` on all fit images.
        kappa_: the margin chosen.
        candidates: what was considered, with verified errors on the validation part; chosen: the one taken.
        bounds, bounds_: the members' bounds on the fit images (`bounds` is the method's name until then, and again in
            `get_params`).
        notes: what a user should know, such as a scale that fell back.
    """

    ensemble: Ensemble
    weights: Tensor
    scales: Tensor
    names: tuple[str, ...]
    solution: Solution
    kappa_: float
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    bounds_: PoolBounds | StoredBounds
    notes: tuple[str, ...]

    def __init__(
        self,
        threat: Threat,
        *,
        kappa: float | str = "auto",
        method: str = "auto",
        bounds: str = "tightest",
        max_members: int | None = None,
        max_megabytes: float | None = None,
    ) -> None:
        self.threat = threat
        self.kappa = kappa
        self.method = method
        self._bounds_method = bounds
        self.max_members = max_members
        self.max_megabytes = max_megabytes

    @property
    def bounds(self) -> str | PoolBounds | StoredBounds:
        """After `fit` the members' bounds on the fit images, before it the name of their method."""
        return self.bounds_ if hasattr(self, "bounds_") else self._bounds_method

    @bounds.setter
    def bounds(self, method: str) -> None:
        self._bounds_method = method

    def fit(
        self,
        pool: Members,
        x: Tensor | np.ndarray[Any, Any],
        y: Tensor | np.ndarray[Any, Any],
        *,
        progress: Progress | None = None,
    ) -> RobBoost:
        """Bounds every member on the fit images x [N, *input] with labels y [N], and finds the weights.

        Args:
            pool: networks, in a list, by name, or from `read_pool`.
            x: images held out from the members' training.
            y: labels.
            progress: told what is being done, steps done, and steps in all.
        """
        self._check()
        members = named(pool)
        images, labels = check_pool(list(members.values()), x, y, list(members))
        found = pool_bounds(
            list(members.values()), images, labels, self.threat, method=self._bounds_method, progress=progress
        )
        return self.fit_bounds(members, found, progress=progress)

    def fit_bounds(
        self, pool: Members, bounds: PoolBounds | StoredBounds, *, progress: Progress | None = None
    ) -> RobBoost:
        """The same from bounds that are there already, in memory or in a store (see `stored_bounds`)."""
        self._check()
        members = named(pool)
        if bounds.threat != self.threat:
            raise InputError(f"bounds hold for {bounds.threat}: expected those for {self.threat}")
        if len(members) != bounds.members:
            raise InputError(f"pool has {len(members)} members and bounds {bounds.members}: expected the same pool")
        scale = bounds.scales()
        scales = torch.tensor(scale.values, dtype=torch.float64)
        sizes = tuple(float32_bytes(member) / 1e6 for member in members.values())
        selection = Selection(bounds, scales, Limits(sizes, self.max_members, self.max_megabytes))
        kappas = _KAPPAS if self.kappa == "auto" else (float(self.kappa),)
        best = min(selection.single(), key=_rank)
        best = replace(best, name=f"member {list(members)[best.weights.index(1.0)]} alone")
        plain = [best, *selection.uniform()]
        solved: list[Candidate] = []
        for step, kappa in enumerate(kappas, start=1):
            weights = self._solve(selection, kappa, everything=False).weights
            solved.append(selection.judge(f"{self.method}, kappa {kappa:g}", weights))
            if progress is not None:
                progress("weights", step, len(kappas) + 1)
        kappa = kappas[solved.index(min(solved, key=_rank))]
        # On all images at the kappa chosen; taken only where the validation part is no worse off than with the others.
        self.solution = self._solve(selection, kappa, everything=True)
        final = selection.judge(f"{self.method}, kappa {kappa:g}, all images", self.solution.weights)
        self.candidates = (final, *solved, *plain)
        self.chosen = selection.without_small(min(self.candidates, key=_rank))
        if progress is not None:
            progress("weights", len(kappas) + 1, len(kappas) + 1)
        self.kappa_ = kappa
        self.names = tuple(members)
        self.scales = scales
        self.weights = torch.tensor(self.chosen.weights, dtype=torch.float64)
        self.bounds_ = bounds
        self.notes = tuple(
            f"scale of {self.names[t]}: {scale.rules[t]}, because its mean intercept is not safely above zero"
            for t in scale.fallback
        )
        self.ensemble = Ensemble(list(members.values()), self.weights, scales, names=self.names).pruned()
        return self

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments (scikit-learn's protocol)."""
        del deep
        return {name: self._bounds_method if name == "bounds" else getattr(self, name) for name in _PARAMETERS}

    def set_params(self, **parameters: Any) -> RobBoost:
        """Changes constructor arguments (scikit-learn's protocol)."""
        for name, value in parameters.items():
            if name not in _PARAMETERS:
                raise InputError(f"parameter {name!r}: expected one of {', '.join(_PARAMETERS)}")
            setattr(self, name, value)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Parameters and outcome of the fit as plain numbers and text."""
        return {
            "threat": str(self.threat),
            "bounds": self.bounds_.method,
            "names": list(self.names),
            "weights": self.weights.tolist(),
            "scales": self.scales.tolist(),
            "kappa": self.kappa_,
            "chosen": self.chosen.name,
            "candidates": [
                {"name": c.name, "validation_verified_error": c.verified.to_dict(), "weights": list(c.weights)}
                for c in self.candidates
            ],
            "solution": self.solution.to_dict(),
            "size_mb": self.ensemble.size_mb,
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Weights and scales as arrays [T]."""
        return {"weights": self.weights.numpy(), "scales": self.scales.numpy()}

    def to_pandas(self) -> Any:
        """One row a member: weight and scale (needs pandas)."""
        import pandas as pd

        columns = {"weight": self.weights.numpy(), "scale": self.scales.numpy()}
        return pd.DataFrame(columns, index=pd.Index(self.names, name="member"))

    def __repr__(self) -> str:
        parameters = ", ".join(f"{name}={value!r}" for name, value in self.get_params().items() if name != "threat")
        return f"RobBoost({self.threat!r}, {parameters})"

    def __str__(self) -> str:
        if not hasattr(self, "weights"):
            return repr(self)
        lines = [
            f"threat        {self.threat}",
            f"fitted on     {len(self.bounds_)} images, bounds {self.bounds_.method}, {self.bounds_.precision}",
            f"chosen        {self.chosen.name}: verified error {self.chosen.verified:i} % on the validation part",
            f"optimum       loss {self.solution.objective:.6g}, proved at least {self.solution.lower_bound:.6g}"
            f" (gap {self.solution.gap:.1e})",
            f"size          {self.ensemble.size_mb:.2f} MB, {len(self.ensemble.members)} of {len(self.names)} members",
        ]
        lines += [
            f"  {name:<20} weight {weight:.4f}   scale {scale:.4g}"
            for name, weight, scale in zip(self.names, self.weights.tolist(), self.scales.tolist(), strict=True)
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _solve(self, selection: Selection, kappa: float, *, everything: bool) -> Solution:
        def solved() -> dict[str, Tensor]:
            with span("weights"):
                text = selection.solve(kappa, self.method, everything=everything).to_json()
            return {"solution": torch.tensor(list(text.encode()), dtype=torch.uint8)}

        step = remembered(f"weights {self.method} {kappa:g} {everything}", solved)
        return Solution.from_json(bytes(step["solution"].tolist()).decode())

    def _check(self) -> None:
        if not isinstance(self.threat, Threat):
            raise InputError(f"threat is a {type(self.threat).__name__}: expected a Threat")
        if self.kappa != "auto" and not (isinstance(self.kappa, (int, float)) and self.kappa > 0):
            raise InputError(f"kappa={self.kappa!r}: expected a number above zero or 'auto'")
        if self.max_members is not None and self.max_members < 1:
            raise InputError(f"max_members={self.max_members}: expected at least 1")
        if self.max_megabytes is not None and not self.max_megabytes > 0:
            raise InputError(f"max_megabytes={self.max_megabytes}: expected above zero")


def _rank(candidate: Candidate) -> tuple[int, float]:
    return candidate.rank
