"""AutoAttack (Croce and Hein) from its own package, for the examples that our attack leaves standing."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn

from robboost.errors import InputError
from robboost.threat import Threat

__all__ = ["auto_attack", "auto_attack_parts", "check_auto_attack"]

_PARTS = ("apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t")
_STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")
_NORMS = {"linf": "Linf", "l2": "L2", "l1": "L1"}
# The targeted parts rank the four largest logits.
_FEWEST_CLASSES = {"apgd-dlr": 3, "apgd-t": 4, "fab-t": 2}


def auto_attack_parts(names: str) -> tuple[str, ...]:
    """The attacks that a text names: "" none, "standard", or some of them joined by "+"."""
    if not names:
        return ()
    parts = _STANDARD if names == "standard" else tuple(name.strip() for name in names.split("+"))
    for part in parts:
        if part not in _PARTS:
            raise InputError(f"autoattack={names!r}: expected 'standard' or some of {', '.join(_PARTS)} joined by '+'")
    return parts


def check_auto_attack(x: Tensor, threat: Threat) -> None:
    """Refuses, before any work, what the package cannot do: it clips to [0, 1] and takes images [C, H, W]."""
    _library()
    if threat.clip is None or tuple(threat.clip) != (0.0, 1.0):
        raise InputError(f"clip={threat.clip}: expected (0, 1), the only pixels that AutoAttack knows")
    if x.ndim != 4:
        raise InputError(f"images have shape {list(x.shape[1:])}: expected [C, H, W] for AutoAttack")


def auto_attack(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, names: str, *, seed: int) -> Tensor:
    """The points that AutoAttack found, [N, C, H, W]; the examples themselves where it found none.

    The caller projects and judges them: nothing is believed of what another library returns.
    """
    if threat.eps == 0:
        return x
    with torch.no_grad():
        classes = model(x[:1]).shape[1]
    wanted = [part for part in auto_attack_parts(names) if classes >= _FEWEST_CLASSES.get(part, 2)]
    if not wanted:
        raise InputError(f"autoattack={names!r}: expected a part that works with {classes} classes, such as apgd-ce")
    library = _library()
    logger, tracer = logging.getLogger("auto-attack"), sys.gettrace()
    level = logger.level
    logger.setLevel(logging.ERROR)
    devices = [x.device] if x.device.type == "cuda" else []
    try:
        # It seeds the global generator and sets a trace function.
        with torch.random.fork_rng(devices), torch.enable_grad():
            adversary = library.AutoAttack(
                model,
                norm=_NORMS[threat.norm],
                eps=threat.eps,
                seed=seed,
                version="standard",
                device=x.device,
            )
            adversary.attacks_to_run = wanted
            adversary.apgd_targeted.n_target_classes = min(adversary.apgd_targeted.n_target_classes, classes - 1)
            adversary.fab.n_target_classes = min(adversary.fab.n_target_classes, classes - 1)
            found, _ = adversary.run_standard_evaluation(x.detach().clone(), y, batch_size=len(x))
    finally:
        sys.settrace(tracer)
        logger.setLevel(level)
    return found.detach().to(x.dtype)


def _library() -> Any:
    try:
        import pyautoattack
    except ImportError:
        raise InputError(
            "autoattack is asked for and not installed: expected the extra, so pip install 'robboost[autoattack]'"
        ) from None
    return pyautoattack
