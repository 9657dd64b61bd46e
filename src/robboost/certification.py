"""Which examples are proved robust: margins of a network or an ensemble over the whole threat set."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robboost.errors import InputError
from robboost.inputs import check_examples
from robboost.intervals import Share
from robboost.mixtures import Progress
from robboost.models import Ensemble
from robboost.proofs import prove
from robboost.threat import Threat

__all__ = ["Certificate", "certify"]


@dataclass(frozen=True, eq=False)
class Certificate:
    """What is proved about each example, and what is not ("unknown", which is not "unsafe").

    Attributes:
        margins: [N, C - 1], float64: lower bounds of true logit minus target logit over the whole threat set; targets
            in class order, the true class skipped.
        certified: [N]: all margins above zero. Ties, NaN and misclassified examples are not certified.
        correct: [N]: the example itself is classified correctly.
        threat: the set; `box_used` says whether the bound made use of the box.
        method: of the bounds.
        precision: the arithmetic of the bounds (margins are summed in float64).
        rechecked: number of examples whose decision was close and was made in float64.
        later: number of examples that only a later stage of `method` certified.
    """

    margins: Tensor = field(repr=False)
    certified: Tensor = field(repr=False)
    correct: Tensor = field(repr=False)
    threat: Threat
    method: str
    precision: str
    box_used: bool
    rechecked: int = 0
    later: int = 0

    @property
    def verified_error(self) -> float:
        """Share of examples without a certificate (paper, definition 3.1)."""
        return self.verified.value

    @property
    def targeted_verified_error(self) -> float:
        """Share of (example, target) pairs whose margin is not proved positive (paper, equation 6)."""
        return 1 - float((self.margins > 0).to(torch.float64).mean())

    @property
    def clean_error(self) -> float:
        """Share of examples that are misclassified without any attack."""
        return self.clean.value

    @property
    def verified(self) -> Share:
        return Share(int((~self.certified).sum()), len(self.certified))

    @property
    def clean(self) -> Share:
        return Share(int((~self.correct).sum()), len(self.correct))

    def to_dict(self) -> dict[str, Any]:
        """Summary and the verdict of every example as plain numbers and text."""
        return {
            "threat": str(self.threat),
            "method": self.method,
            "precision": self.precision,
            "box_used": self.box_used,
            "rechecked": self.rechecked,
            "certified_by_later_stages": self.later,
            "verified_error": self.verified.to_dict(),
            "targeted_verified_error": self.targeted_verified_error,
            "clean_error": self.clean.to_dict(),
            "certified": self.certified.tolist(),
            "lowest_margin": self.margins.amin(1).tolist(),
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """The tensors as arrays, by name."""
        tensors = {"margins": self.margins, "certified": self.certified, "correct": self.correct}
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}

    def to_pandas(self) -> Any:
        """One row an example: certified, correct, lowest margin (needs pandas)."""
        import pandas as pd

        return pd.DataFrame(
            {
                "certified": self.certified.cpu().numpy(),
                "correct": self.correct.cpu().numpy(),
                "lowest_margin": self.margins.amin(1).cpu().numpy(),
            }
        )

    def __str__(self) -> str:
        later = f", {self.later} certified by later stages" if ">" in self.method else ""
        box = "" if self.box_used or self.threat.clip is None else " (bound without the box)"
        return "\n".join(
            [
                f"threat                    {self.threat}{box}",
                f"certified                 {int(self.certified.sum())} of {len(self.certified)}",
                f"verified error            {self.verified:i} %",
                f"targeted verified error   {100 * self.targeted_verified_error:.2f} %",
                f"clean error               {self.clean:i} %",
                f"bounds                    {self.method}, {self.precision},"
                f" {self.rechecked} close calls in float64{later}",
            ]
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def certify(
    model: nn.Module,
    x: Tensor | np.ndarray[Any, Any],
    y: Tensor | np.ndarray[Any, Any],
    threat: Threat,
    *,
    method: str = "tightest",
    progress: Progress | None = None,
) -> Certificate:
    """Proves, example by example, that no point of the threat set changes the class.

    An `Ensemble` is certified by the weighted sum of its members' linear bounds (paper, equation 7), each member under
    `method`; any other network by its own. `certify_joint` bounds an ensemble as one network instead.

    Guaranteed: for certified examples, every x' in the set has f_y(x') > f_j(x') for all j != y, for the network as a
    function of real numbers (rounding inside the network's own float32 evaluation is not part of the statement). Final
    margins are formed in float64 less a rounding allowance; examples that are decided by a margin near zero are bounded
    again in float64 throughout. Not guaranteed: anything about other images, or about those reported as not certified.

    Args:
        model: network or ensemble, [N, *input] -> logits [N, C].
        x: examples [N, *input], in the units of `threat`.
        y: labels [N].
        threat: the set of attacks.
        method: "ibp", "crown-ibp", "crown", "same-slope", "alpha-crown", "tightest" (the best of several, pair by
            pair), some of them joined, such as "ibp+crown", or stages: "crown>alpha-crown" bounds what the first leaves
            open (and a short attack does not decide) once more, an ensemble then as one network.
        progress: told what is being done, steps done, and steps in all.
    """
    if isinstance(model, Ensemble):
        used = model.pruned()
        return _certify(list(used.members), used.coefficients(), model, (x, y), threat, method, progress)
    one = torch.ones(1, dtype=torch.float64)
    return _certify([model], one, model, (x, y), threat, method, progress)


def certify_joint(
    ensemble: Ensemble,
    x: Tensor | np.ndarray[Any, Any],
    y: Tensor | np.ndarray[Any, Any],
    threat: Threat,
    *,
    method: str = "tightest",
    progress: Progress | None = None,
) -> Certificate:
    """The certificate of an ensemble bounded as one network.

    Sound like `certify`, and up to rounding the same margins for each single method.
    """
    if not isinstance(ensemble, Ensemble):
        raise InputError(f"ensemble is a {type(ensemble).__name__}: expected an Ensemble (use certify)")
    one = torch.ones(1, dtype=torch.float64)
    return _certify([ensemble.pruned()], one, ensemble, (x, y), threat, method, progress)


def _certify(
    members: list[nn.Module],
    coefficients: Tensor,
    whole: nn.Module,
    examples: tuple[Any, Any],
    threat: Threat,
    method: str,
    progress: Progress | None,
) -> Certificate:
    x, y = check_examples(whole, *examples)
    proof = prove(members, x, y, threat, [coefficients], method=method, progress=progress)
    tensors = proof.margins[0], proof.certified[0], proof.correct[0]
    counts = proof.rechecked, int(proof.later[0])
    return Certificate(*tensors, threat, method, "float32", threat.box_used, *counts)
