"""The numbers behind the paper's figures 1 to 3; drawing them is another matter (`reproduce.drawing`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robboost.bounds import margin_bounds
from robboost.data import Dataset, load_dataset
from robboost.errors import InputError
from robboost.intervals import Share, paired_test
from robboost.mixtures import Progress
from robboost.models import Ensemble, load_model
from robboost.proofs import prove
from robboost.reproduce.paper import BOOSTED
from robboost.reproduce.request import Request
from robboost.reproduce.settings import Setting, chosen_settings, setting_of
from robboost.reproduce.summaries import packed, unpacked
from robboost.threat import Threat
from robboost.training import RunOptions, TrainConfig, train_pool

__all__ = ["figure1", "figure2", "figure3"]

_DIGIT, _TARGET, _EPS = 1, 2, 0.05
# The networks of figure 1; the paper names neither radius nor length of its adversarial training.
_ADVERSARIAL_EPS, _EPOCHS = 0.1, 10


def figure1(request: Request, progress: Progress | None) -> dict[str, Any]:
    """Slopes of the margin of digit 1 against 2 for a naturally and an adversarially trained MLP (CROWN, eps 0.05).

    `on_digit` is the share of the slope's l_1 norm that lies on the digit and the pixels around it.
    """
    data, heldout, test = (load_dataset(request.data or "mnist", split=s) for s in ("train", "heldout", "test"))
    if request.limit is not None:
        data, heldout = (part.take(min(request.limit, len(part))) for part in (data, heldout))
    natural = TrainConfig(
        "mlp-4x1024",
        "natural",
        _ADVERSARIAL_EPS,
        epochs=request.epochs or _EPOCHS,
        batch=min(256, len(data)),
        init="default",
        name="natural",
        pool="figure1",
    )
    attacked = replace(natural, method="adversarial", name="adversarial", attack_steps=7, warmup=0.0, ramp=0.3)
    configs = [natural, attacked]
    trained = train_pool(
        configs,
        data,
        heldout=heldout,
        options=RunOptions(out=request.work, device=request.device, minutes=request.minutes),
        progress=None if progress is None else lambda p: progress(f"training {p.member}", p.epoch, p.epochs),
    )
    position = int((test.labels == _DIGIT).nonzero()[0])
    x, y = test.images[position : position + 1], test.labels[position : position + 1]
    near = torch.nn.functional.max_pool2d(x, 3, stride=1, padding=1)[0, 0] > 0
    networks = {}
    for config, member in zip(configs, trained, strict=True):
        model = member.model.cpu().eval()
        bounds = margin_bounds(model, x, y, Threat(_EPS, clip=(0.0, 1.0)), "crown", precision="float64")
        # Targets in class order, the true class skipped.
        slope = bounds.slope[0, _TARGET - 1, 0]
        assert member.figures is not None
        networks[config.short_name] = {
            "slope": [[round(value, 7) for value in row] for row in slope.tolist()],
            "l1": float(slope.abs().sum()),
            "on_digit": float(slope.abs()[near].sum() / slope.abs().sum()),
            "lower": float(bounds.lower[0, _TARGET - 1]),
            "heldout_clean_error": member.figures.clean_error,
            "epochs": config.epochs,
        }
    return {
        "figure": 1,
        "digit": _DIGIT,
        "target": _TARGET,
        "eps": _EPS,
        "adversarial_eps": _ADVERSARIAL_EPS,
        "image": {"dataset": test.name, "position": position, "pixels": x[0, 0].tolist()},
        "networks": networks,
    }


def figure2(runs: Sequence[Path], request: Request, progress: Progress | None) -> dict[str, Any]:
    """Verified and clean test error of boosted ensembles over their number of members, beside the fitted pool's."""
    wanted = list(runs) or [request.pools / s.boosted for s in chosen_settings(request.settings, tuple(BOOSTED))]
    there = [run for run in wanted if (run / "boosting.json").exists()]
    if not there or (runs and len(there) < len(runs)):
        missing = next(run for run in wanted if run not in there)
        raise InputError(
            f"{missing}: no boosting.json; expected the folder of a finished run of `robboost boost`"
            " (it writes OUT/NAME), or such folders below --pools"
        )
    found = [_boosted(run, request, progress) for run in there]
    return {"figure": 2, "runs": {values["name"]: values for values in found}}


def _boosted(run: Path, request: Request, progress: Progress | None) -> dict[str, Any]:
    """Certificates of every stage on the test set, each by the proof that `certify` uses."""
    about = json.loads((run / "boosting.json").read_text(encoding="utf-8"))
    stages, config = about["stages"], about["config"]
    last = load_model(run / f"stage-{len(stages)}.safetensors")
    if not isinstance(last, Ensemble):
        raise InputError(f"{run}: stage-{len(stages)}.safetensors is no ensemble; expected what `robboost boost` wrote")
    test = load_dataset(request.data or config["dataset"], split="test")
    if request.limit is not None:
        test = test.take(min(request.limit, len(test)))
    device = torch.device(request.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    networks = [member.to(device) for member in last.members]
    mixes = [_coefficients(stage["coefficients"], len(networks)) for stage in stages]
    threat = Threat(request.eps or config["stages"][0]["eps"], clip=(0.0, 1.0))
    method = request.bounds or about["bounds"]
    say: Progress | None = None
    if progress is not None:
        tell = progress
        say = lambda what, done, total: tell(f"{run.name}: {what}", done, total)  # noqa: E731
    proof = prove(networks, test.images.to(device), test.labels.to(device), threat, mixes, method=method, progress=say)
    failed, chosen = ~proof.certified.cpu(), about["chosen"] - 1
    setting = setting_of(run.name)
    values: dict[str, Any] = {
        "name": run.name,
        "threat": str(threat),
        "bounds": method,
        "test": {"name": test.name, "images": len(test), "sha256": test.sha256()},
        "members": [stage["member"] for stage in stages],
        "megabytes": [stage["size_mb"] for stage in stages],
        "verified": [_share(failed[m]) for m in range(len(stages))],
        "clean": [_share(~proof.correct[m].cpu()) for m in range(len(stages))],
        "chosen": about["chosen"],
        "failed": packed(failed[chosen]),
        "tests": {"chosen against the first member": paired_test(failed[chosen], failed[0]).to_dict()},
        "paper": None if setting is None or setting.name not in BOOSTED else vars(BOOSTED[setting.name]),
    }
    if setting is not None and (pool := _pool_failures(setting, request, test)) is not None:
        values["tests"]["chosen against the fitted pool"] = paired_test(failed[chosen], pool).to_dict()
        values["fitted_pool"] = _share(pool)
    return values


def _coefficients(values: Sequence[float], count: int) -> Tensor:
    padded = torch.zeros(count, dtype=torch.float64)
    padded[: len(values)] = torch.tensor(values, dtype=torch.float64)
    return padded / padded.sum()


def _pool_failures(setting: Setting, request: Request, test: Dataset) -> Tensor | None:
    """Test images that the fitted pool of the setting does not certify, where its results are on the same images."""
    file = request.pools / setting.name / "results.json"
    if not file.exists():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    if found["test"]["sha256"] != test.sha256():
        return None
    return ~unpacked(found["certified"]["RobBoost"], len(test))


def figure3(settings: Sequence[str], figures: Callable[[str], Mapping[str, Any] | None]) -> dict[str, Any]:
    """Distribution of the margins' lower bounds, uniform and RobBoost, of every pool that is there."""
    pools = {}
    for setting in chosen_settings(settings):
        for name in (setting.faithful, setting.name):
            if (values := figures(name)) is not None:
                pools[name] = {"label": setting.label, **values["histogram"]}
    if not pools:
        raise InputError("none of the pools of these settings is there; expected at least one below --pools")
    return {"figure": 3, "pools": pools}


def _share(mask: Tensor) -> dict[str, Any]:
    return Share(int(mask.sum()), len(mask)).to_dict()
