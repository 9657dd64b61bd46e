"""The table that answers "is the ensemble better than my best network, and is the difference real?": `compare`."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import robboost
from robboost.attacks import Attacked, AttackSettings, attack
from robboost.combinations import Cascade
from robboost.errors import InputError, SoundnessError
from robboost.fitting import RobBoost
from robboost.inputs import check_pool
from robboost.intervals import PairedTest, Share, paired_test
from robboost.mixtures import Members, PoolBounds, Progress, named, pool_bounds
from robboost.models import Ensemble
from robboost.proofs import Proof, prove, stages
from robboost.rows import Row, cascade_row, network_rows, oracle_rows, vote_row
from robboost.selection import Limits, Selection
from robboost.tables import comparison_html, comparison_text
from robboost.threat import Threat
from robboost.weights import Solution

__all__ = ["Comparison", "Row", "Settings", "compare"]

Examples = tuple[Tensor | np.ndarray[Any, Any], Tensor | np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Settings:
    """What `compare` does.

    Attributes:
        bounds: method of the bounds, see `certify`.
        robboost: options of `RobBoost` (kappa, max_members, max_megabytes).
        attack: how hard to attack; None: not at all.
        cascade: also evaluate the cascade, and look for points that break it.
    """

    bounds: str = "tightest"
    robboost: Mapping[str, Any] = field(default_factory=dict)
    attack: AttackSettings | None = field(default_factory=AttackSettings)
    cascade: bool = True


@dataclass(frozen=True, eq=False)
class Comparison:
    """The table, the paired tests, and what a report draws.

    Attributes:
        rows: single members, mixes, voting, cascade, oracles.
        tests: paired tests of RobBoost against the best single member and against uniform, on the test set.
        overlap: [T, T], share of test examples that both members certify (the diagonal: each alone).
        names: of the members.
        fitted: the `RobBoost` whose mix is in the table.
        mixes: name of the row -> coefficients weight / scale [T], for the rows that are networks.
        margins: name of the row -> lowest margin of each test example [N], for the rows that are networks.
        provenance: versions, threat, sizes, settings.
    """

    rows: tuple[Row, ...]
    tests: Mapping[str, PairedTest]
    overlap: Tensor = field(repr=False)
    names: tuple[str, ...]
    fitted: RobBoost = field(repr=False)
    mixes: Mapping[str, Tensor] = field(repr=False)
    margins: Mapping[str, Tensor] = field(repr=False)
    provenance: Mapping[str, Any] = field(repr=False)

    def row(self, name: str) -> Row:
        """The row of that name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise InputError(f"row {name!r}: expected one of {', '.join(row.name for row in self.rows)}")

    def to_dict(self) -> dict[str, Any]:
        """Everything but the bounds, as plain numbers and text."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "tests": {name: test.to_dict() for name, test in self.tests.items()},
            "overlap": self.overlap.tolist(),
            "names": list(self.names),
            "robboost": self.fitted.to_dict(),
            "provenance": dict(self.provenance),
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Arrays by name: overlap, weights, scales, and the lowest margins of every network, "margins NAME"."""
        tensors = {
            "overlap": self.overlap,
            "weights": self.fitted.weights,
            "scales": self.fitted.scales,
            **{f"margins {name}": margins for name, margins in self.margins.items()},
        }
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}

    def to_pandas(self) -> Any:
        """One row a way to classify, errors in percent (needs pandas)."""
        import pandas as pd

        def percent(share: Share | None) -> float | None:
            return None if share is None else 100 * share.value

        return pd.DataFrame(
            [
                {
                    "name": row.name,
                    "claim": row.claim,
                    "verified error fit": percent(row.verified_fit),
                    "verified error": percent(row.verified),
                    "targeted": None if row.targeted is None else 100 * row.targeted,
                    "clean error": percent(row.clean),
                    "attack error": percent(row.attacked),
                    "MB": row.size_mb,
                    "members": row.members,
                }
                for row in self.rows
            ]
        ).set_index("name")

    def __str__(self) -> str:
        return comparison_text(self.to_dict())

    def _repr_html_(self) -> str:
        return comparison_html(self.to_dict())


def compare(
    pool: Members,
    *,
    fit: Examples,
    test: Examples,
    threat: Threat,
    settings: Settings = Settings(),
    progress: Progress | None = None,
) -> Comparison:
    """Every sound way to use the pool, side by side, on the same images.

    All choices (best member, scales, weights, kappa, weights of the vote) are made on the fit images; test images only
    measure. Intervals and tests speak about other images of the same kind; each certificate by itself is a proof.

    Args:
        pool: networks, in a list, by name, or from `read_pool`.
        fit: images and labels, held out from the members' training.
        test: images and labels that nothing was chosen on.
        threat: the set of attacks.
        settings: bounds, attack, options of `RobBoost`.
        progress: told what is being done, steps done, and steps in all.
    """
    members = named(pool)
    if "bounds" in settings.robboost:
        raise InputError("robboost={'bounds': ...}: expected Settings(bounds=...), for all rows alike")
    x_fit, y_fit = check_pool(list(members.values()), *fit, list(members))
    x, y = check_pool(list(members.values()), *test, list(members))
    networks = list(members.values())
    first = stages(settings.bounds)[0]
    fit_bounds = pool_bounds(networks, x_fit, y_fit, threat, method=first, progress=_say(progress, "fit"))
    fitted = RobBoost(threat, bounds=first, **settings.robboost).fit_bounds(members, fit_bounds, progress=progress)
    faithful, reason = _coordinate(fitted)
    mixes = _mixes(fitted, faithful)
    on_fit = _on_fit(fit_bounds, list(mixes.values()))
    on_test = prove(
        networks, x, y, threat, list(mixes.values()), method=settings.bounds, progress=_say(progress, "test")
    )
    count = len(members)
    best = int(on_fit.certified[:count].sum(1).argmax())
    rows = network_rows(mixes, members, on_fit, on_test)
    attacks = _attack_rows(rows, mixes, members, (x, y), threat, settings, on_test, progress)
    rows = [replace(row, attacked=attacks[row.name].share) if row.name in attacks else row for row in rows]
    top = replace(rows[best], note="chosen on the fit images", name=f"best single ({fitted.names[best]})")
    points = [attacks[name].adversarial for name in mixes if name in attacks]
    others = [vote_row(fitted, members, on_fit, on_test, (y_fit, y), (x, points))]
    if settings.cascade:
        order = on_fit.certified[:count].sum(1).argsort(descending=True).tolist()
        cascade = Cascade([networks[t] for t in order], threat, method=first)
        others.append(cascade_row(cascade, (x_fit, y_fit), (x, y), points[:count]))
    others += oracle_rows(on_fit, on_test, count)
    failures = {name: ~on_test.certified[n] for n, name in enumerate(mixes)}
    tests = {
        "RobBoost against best single": paired_test(failures["RobBoost"], ~on_test.certified[best]),
        "RobBoost against uniform": paired_test(failures["RobBoost"], failures["uniform"]),
    }
    safe = on_test.certified[:count].to(torch.float64)
    return Comparison(
        rows=(top, *rows[count:], *others, *rows[:count]),
        tests=tests,
        overlap=safe @ safe.T / len(x),
        names=tuple(members),
        fitted=fitted,
        mixes=mixes,
        margins={name: on_test.margins[n].amin(1) for n, name in enumerate(mixes)},
        provenance=_provenance(threat, settings, (len(x_fit), len(x)), on_test.rechecked, (reason, str(x.device))),
    )


def _on_fit(bounds: PoolBounds, mixes: list[Tensor]) -> Proof:
    """What the mixes certify of the fit images, from bounds that are there already: to choose by, not to publish."""
    margins = torch.stack([bounds.mix(mix).lower for mix in mixes])
    correct = torch.stack([bounds.correct(mix) for mix in mixes])
    return Proof(margins, (margins > 0).all(2) & correct, correct, 0, torch.zeros(len(mixes), dtype=torch.int64))


def _coordinate(fitted: RobBoost) -> tuple[Solution | None, str]:
    """The paper's algorithm: kappa 1, coordinate descent, all fit images; l_inf only."""
    if fitted.threat.norm != "linf":
        return None, "coordinate descent is defined for linf"
    sizes = (0.0,) * len(fitted.names)
    selection = Selection(fitted.bounds_, fitted.scales, Limits(sizes))
    return selection.solve(1.0, "coordinate", everything=True), ""


def _mixes(fitted: RobBoost, faithful: Solution | None) -> dict[str, Tensor]:
    """Coefficients weight / scale of every row that is a network."""
    count = len(fitted.names)
    units = torch.eye(count, dtype=torch.float64) / fitted.scales
    rows = {f"member {name}": unit for name, unit in zip(fitted.names, units, strict=True)}
    rows["uniform"] = torch.full((count,), 1 / count, dtype=torch.float64) / fitted.scales
    rows["RobBoost"] = fitted.weights / fitted.scales
    if faithful is not None:
        rows["RobBoost (coordinate descent)"] = torch.tensor(faithful.weights, dtype=torch.float64) / fitted.scales
    return rows


def _attack_rows(
    rows: list[Row],
    mixes: Mapping[str, Tensor],
    members: Mapping[str, nn.Module],
    test: tuple[Tensor, Tensor],
    threat: Threat,
    settings: Settings,
    on_test: Proof,
    progress: Progress | None,
) -> dict[str, Attacked]:
    """Each network attacked; a success on a certified example raises SoundnessError."""
    if settings.attack is None:
        return {}
    found = {}
    for n, row in enumerate(rows):
        mix = mixes[row.name]
        network = Ensemble(list(members.values()), mix / mix.sum(), names=list(members)).pruned()
        try:
            found[row.name] = attack(
                network, *test, threat, settings=settings.attack, certified=on_test.certified[n],
                progress=_rows_done(progress, n, len(rows)),
            )  # fmt: skip
        except SoundnessError as error:
            raise SoundnessError(
                f"{row.name}, bounds {settings.bounds}, weight / scale {mix.tolist()}: {error}"
            ) from None
    return found


def _rows_done(progress: Progress | None, row: int, rows: int) -> Progress | None:
    """One count of images over all rows."""
    if progress is None:
        return None
    tell = progress
    return lambda what, done, total: tell(what, row * total + done, rows * total)


def _say(progress: Progress | None, part: str) -> Progress | None:
    if progress is None:
        return None
    tell = progress
    return lambda what, done, total: tell(f"{what}, {part} images", done, total)


def _provenance(
    threat: Threat, settings: Settings, counts: tuple[int, int], rechecked: int, about: tuple[str, str]
) -> dict[str, Any]:
    reason, device = about
    return {
        "robboost": robboost.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, bounds on {device}",
        "threat": str(threat),
        "box": "used by the bounds" if threat.box_used else "not used by the bounds",
        "bounds": settings.bounds,
        "precision": f"float32, margins summed in float64, {rechecked} close calls bounded in float64",
        "fit images": counts[0],
        "test images": counts[1],
        "attack": None if settings.attack is None else vars(settings.attack),
        **({"left out": reason} if reason else {}),
    }
