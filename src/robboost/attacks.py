"""Attacks by projected gradient descent: how far a network can really be fooled, and a test of every certificate.

An attack proposes points; this module, not the attack, projects them into the threat set, checks that they are in it,
and judges them in float64.
"""

from __future__ import annotations

import html
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from robboost.auto_attack import auto_attack, auto_attack_parts, check_auto_attack
from robboost.counterexamples import Counterexample, save_counterexample
from robboost.errors import InputError, SoundnessError
from robboost.inputs import Progress, check_examples, in_float64
from robboost.intervals import Share
from robboost.journal import remembered
from robboost.observability import span
from robboost.threat import Threat

__all__ = ["AttackSettings", "Attacked", "attack", "margins_at"]


@dataclass(frozen=True)
class AttackSettings:
    """How hard to try.

    Attributes:
        steps: gradient steps of a restart.
        restarts: random starts; the first start is the example itself.
        targets: "untargeted" follows the most dangerous wrong class of the moment, "targeted" tries each wrong class in
            turn (C - 1 times the work), "both" does both.
        momentum: share of the last direction that is kept.
        step: first step length as a share of eps; it falls to a hundredth along a cosine.
        batch_size: examples attacked together.
        seed: of the random starts.
        autoattack: what of AutoAttack comes afterwards, against the examples that still stand: "" nothing, "standard",
            or parts such as "apgd-ce+apgd-t" (needs the extra `robboost[autoattack]` and pixels in [0, 1]).
    """

    steps: int = 40
    restarts: int = 2
    targets: Literal["untargeted", "targeted", "both"] = "untargeted"
    momentum: float = 0.75
    step: float = 0.5
    batch_size: int = 512
    seed: int = 0
    autoattack: str = ""

    def __post_init__(self) -> None:
        for name in ("steps", "restarts", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.targets not in ("untargeted", "targeted", "both"):
            raise InputError(f"targets={self.targets!r}: expected 'untargeted', 'targeted' or 'both'")
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum={self.momentum}: expected at least 0 and below 1")
        if not self.step > 0:
            raise InputError(f"step={self.step}: expected above 0")
        auto_attack_parts(self.autoattack)


@dataclass(frozen=True, eq=False)
class Attacked:
    """The worst points that were found. Their absence proves nothing.

    Attributes:
        adversarial: [N, *input], float64: per example the point of the threat set with the lowest margin seen.
        margins: [N], float64: there, true logit minus the largest other.
        success: [N]: margin not above zero (misclassified examples included).
        clean: [N]: the example itself is misclassified.
    """

    adversarial: Tensor = field(repr=False)
    margins: Tensor = field(repr=False)
    success: Tensor = field(repr=False)
    clean: Tensor = field(repr=False)
    threat: Threat
    settings: AttackSettings

    @property
    def error(self) -> float:
        """Share of examples that the attack, or nature, made wrong: a lower bound of the robust error."""
        return self.share.value

    @property
    def share(self) -> Share:
        return Share(int(self.success.sum()), len(self.success))

    def to_dict(self) -> dict[str, Any]:
        """Summary as plain numbers and text; the points are left out."""
        return {
            "threat": str(self.threat),
            "attack_error": self.share.to_dict(),
            "clean_error": Share(int(self.clean.sum()), len(self.clean)).to_dict(),
            "settings": vars(self.settings),
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """The tensors as arrays, by name."""
        tensors = {"adversarial": self.adversarial, "margins": self.margins, "success": self.success,
                   "clean": self.clean}  # fmt: skip
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}

    def to_pandas(self) -> Any:
        """One row an example: success, clean (misclassified without an attack), margin (needs pandas)."""
        import pandas as pd

        arrays = self.to_numpy()
        return pd.DataFrame(
            {"success": arrays["success"], "misclassified": arrays["clean"], "margin": arrays["margins"]}
        )

    def __str__(self) -> str:
        more = f", then AutoAttack ({self.settings.autoattack})" if self.settings.autoattack else ""
        return "\n".join(
            [
                f"threat         {self.threat}",
                f"attack         {self.settings.steps} steps x {self.settings.restarts},"
                f" {self.settings.targets}{more}, seed {self.settings.seed}",
                f"attack error   {self.share:i} %",
                f"clean error    {Share(int(self.clean.sum()), len(self.clean)):i} %",
            ]
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def attack(
    model: nn.Module,
    x: Tensor | np.ndarray[Any, Any],
    y: Tensor | np.ndarray[Any, Any],
    threat: Threat,
    *,
    settings: AttackSettings = AttackSettings(),
    certified: Tensor | None = None,
    progress: Progress | None = None,
) -> Attacked:
    """Searches the threat set around each example for a point that the model gets wrong.

    Descends the margin f_y - max_{j != y} f_j (or f_y - f_j for a chosen j) with momentum, from the example and from
    random points of the set. The lowest margin of any step counts, not that of the last one.

    Args:
        model: classifier, [N, *input] -> logits [N, C]; a single network or an `Ensemble`.
        x: examples [N, *input].
        y: labels [N].
        threat: where the attacker may move.
        settings: steps, restarts, targets.
        certified: [N] mask of examples proved robust under this threat. A success on one of them is a contradiction:
            SoundnessError that says which, with the point, the image, the network and the settings saved in files.
        progress: told what is being done, examples done, and examples in all.
    """
    x, y = check_examples(model, x, y)
    if settings.autoattack:
        check_auto_attack(x, threat)
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        parts = []
        for start in range(0, len(x), settings.batch_size):
            part = slice(start, min(start + settings.batch_size, len(x)))
            work = partial(_attack_batch, model, x[part], y[part], threat, settings=settings,
                           tell=_within(progress, part, len(x)))  # fmt: skip
            parts.append(remembered(f"attack {start}", partial(_as_step, work))["point"].to(x.device))
            if progress is not None:
                progress("attack", part.stop, len(x))
    finally:
        for module in was_training:
            module.training = True
    point = torch.cat(parts)
    judge = in_float64(model)
    base = x.to(torch.float64)
    margins = margins_at(judge, point, y, batch_size=settings.batch_size)
    natural = margins_at(judge, base, y, batch_size=settings.batch_size)
    # The example itself is a point of the set too.
    better = natural < margins
    point = torch.where(better.view(-1, *[1] * (x.dim() - 1)), base, point)
    margins = torch.where(better, natural, margins)
    result = Attacked(point, margins, ~(margins > 0), ~(natural > 0), threat, settings)
    if certified is not None:
        _check_sound(model, result, certified, (x, y))
    return result


def margins_at(model: nn.Module, point: Tensor, y: Tensor, *, batch_size: int = 512) -> Tensor:
    """True logit minus the largest other one at each point [N, *input]: [N], NaN where a logit is NaN."""
    with torch.no_grad():
        parts = [
            _margin(model(point[start : start + batch_size]), y[start : start + batch_size])
            for start in range(0, len(point), batch_size)
        ]
    return torch.cat(parts)


def _as_step(work: Callable[[], Tensor]) -> dict[str, Tensor]:
    return {"point": work()}


def _within(progress: Progress | None, part: slice, total: int) -> Callable[[float], None]:
    """Progress inside a batch: called with the share of its work that is done."""

    def tell(share: float) -> None:
        if progress is not None:
            progress("attack", part.start + int(share * (part.stop - part.start)), total)

    return tell


@span("attack")
def _attack_batch(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    settings: AttackSettings,
    tell: Callable[[float], None],
) -> Tensor:
    """Per example the worst point seen, in float64 and inside the threat set."""
    # Seeded by the batch itself: its starts are the same whatever was attacked before, and in whichever process.
    content = zlib.crc32(x.detach().cpu().contiguous().numpy().tobytes())
    generator = torch.Generator(device=x.device).manual_seed((settings.seed * 2**32 + content) % 2**63)
    with torch.no_grad():
        classes = model(x[:1]).shape[1]
    goals: list[Callable[[Tensor], Tensor]] = []
    if settings.targets != "targeted":
        goals.append(partial(_margin, y=y))
    if settings.targets != "untargeted":
        # Class order, the true class skipped.
        goals += [partial(_pair_margin, y=y, target=torch.where(j < y, j, j + 1)) for j in range(classes - 1)]
    worst, lowest = x, torch.full((len(x),), torch.inf, dtype=x.dtype, device=x.device)
    total = len(goals) * settings.restarts + bool(settings.autoattack)
    for number, (goal, restart) in enumerate(product(goals, range(settings.restarts)), start=1):
        start = x if restart == 0 else threat.sample(x, generator=generator)
        worst, lowest = _descend(model, start, x, y, threat, goal=goal, settings=settings, best=(worst, lowest))
        tell(number / total)
    if settings.autoattack:
        standing = (lowest > 0).nonzero()[:, 0]
        if len(standing):
            found = auto_attack(model, x[standing], y[standing], threat, settings.autoattack, seed=settings.seed)
            with torch.no_grad():
                fooled = ~(_margin(model(found), y[standing]) > 0)
            worst = worst.index_copy(0, standing[fooled], found[fooled])
    exact = x.to(torch.float64)
    point = threat.project(worst.to(torch.float64), exact)
    if not bool(threat.contains(point, exact, tolerance=1e-12).all()):
        raise SoundnessError("internal: the attack's projection left the threat set")
    return point


def _descend(
    model: nn.Module,
    start: Tensor,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    goal: Callable[[Tensor], Tensor],
    settings: AttackSettings,
    best: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    worst, lowest = best
    point, velocity = threat.project(start, x), torch.zeros_like(x)
    for step in range(settings.steps + 1):
        point = point.detach().requires_grad_(True)
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            logits = model(point)
            (gradient,) = torch.autograd.grad(goal(logits).sum(), point)
        margin = _margin(logits.detach(), y)
        # NaN counts as the worst: the network gives no answer there.
        lower = (margin < lowest) | margin.isnan()
        worst = torch.where(lower.view(-1, *[1] * (x.dim() - 1)), point.detach(), worst)
        lowest = torch.where(lower, margin.nan_to_num(nan=-torch.inf), lowest)
        if step == settings.steps:
            break
        velocity = settings.momentum * velocity + _direction(gradient, threat)
        length = settings.step * (0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * step / settings.steps)))
        move = velocity.sign() if threat.norm == "linf" else velocity
        point = threat.project(point.detach() - length * threat.eps * move, x)
    return worst, lowest


def _direction(gradient: Tensor, threat: Threat) -> Tensor:
    """The gradient, scaled per example so that momentum adds like with like: steepest for l_2 and l_1."""
    flat = gradient.nan_to_num().flatten(1)
    tiny = torch.finfo(flat.dtype).tiny
    if threat.norm == "linf":
        scaled = flat / flat.abs().mean(1, keepdim=True).clamp(min=tiny)
    elif threat.norm == "l2":
        scaled = flat / flat.norm(dim=1, keepdim=True).clamp(min=tiny)
    else:
        # The steepest l_1 direction moves one pixel; the largest hundredth together finds more.
        count = max(1, flat.shape[1] // 100)
        kept = flat.abs() >= flat.abs().topk(count, dim=1).values[:, -1:]
        signs = flat.sign() * kept
        scaled = signs / signs.abs().sum(1, keepdim=True).clamp(min=1)
    return scaled.view_as(gradient)


def _margin(logits: Tensor, y: Tensor) -> Tensor:
    true = logits.gather(1, y[:, None])[:, 0]
    others = logits.scatter(1, y[:, None], -torch.inf).amax(1)
    return true - others


def _pair_margin(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return (logits.gather(1, y[:, None]) - logits.gather(1, target[:, None]))[:, 0]


def _check_sound(model: nn.Module, result: Attacked, certified: Tensor, examples: tuple[Tensor, Tensor]) -> None:
    mask = torch.as_tensor(certified, device=result.success.device)
    if mask.shape != result.success.shape or mask.dtype != torch.bool:
        raise InputError(f"certified is {mask.dtype} {list(mask.shape)}: expected a mask [{len(result.success)}]")
    broken = (mask & result.success).nonzero()[:, 0]
    if not len(broken):
        return
    first = int(broken[0])
    x, y = examples
    saved = save_counterexample(
        model,
        Counterexample(broken, result.adversarial[broken], x[broken], y[broken], result.margins[broken]),
        {"threat": vars(result.threat), "settings": vars(result.settings)},
    )
    raise SoundnessError(
        f"{len(broken)} certified example(s) fooled, first index {first} (label {int(y[first])}, margin"
        f" {float(result.margins[first]):.3g}, {result.threat}, seed {result.settings.seed}): {saved};"
        " please report this"
    )
