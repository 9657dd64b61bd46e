"""One pool measured once: weights fitted on held-out images, every figure of the tables from the same proofs.

The test set is looked at after everything has been chosen, and chooses nothing.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import robboost
from robboost.attacks import AttackSettings, attack
from robboost.data import Dataset
from robboost.devices import usable_device
from robboost.errors import InputError
from robboost.fitting import RobBoost
from robboost.inputs import check_pool
from robboost.intervals import Share, paired_test
from robboost.journal import package_digest
from robboost.mixtures import PoolBounds, Progress, pool_bounds
from robboost.models import Ensemble, Pool
from robboost.models.architectures import float32_bytes
from robboost.models.pools import parameter_digest
from robboost.proofs import Proof, prove, stages
from robboost.reproduce.parts import Parts, identity
from robboost.reproduce.summaries import eliminated, histogram, packed
from robboost.store import FillSettings, fill_store
from robboost.stored import StoredBounds, stored_bounds
from robboost.threat import Threat

__all__ = ["FORMAT", "Images", "Protocol", "measure", "suited_bounds"]

FORMAT = 1
# Images of one part: what an interruption costs.
_PART = {"cpu": 500, "cuda": 2500}
_ATTACK_BATCH = {"cpu": 512, "cuda": 2048}
# On a CPU the bounds on more images than this go to disk as they come.
_STORE_FROM = 1000


@dataclass(frozen=True)
class Images:
    """Where weights are fitted, what is measured, and (as far as wanted) what the members were trained on."""

    fit: Dataset
    test: Dataset
    train: Dataset | None = None


@dataclass(frozen=True)
class Protocol:
    """How a pool is measured.

    Attributes:
        bounds: method of all bounds; "": what suits the members' training. Weights are fitted on its first stage.
        attack: how hard to attack; None: not at all.
        device: "cpu", "cuda", ...; None: the GPU where there is one.
    """

    bounds: str = ""
    attack: AttackSettings | None = field(default_factory=AttackSettings)
    device: str | None = None

    @property
    def chosen_device(self) -> torch.device:
        return usable_device(self.device)


def suited_bounds(pool: Pool) -> str:
    """Interval bounds and one linear pass for pools trained by intervals alone; else the best of four methods."""
    methods = {str(member.config.get("method", "")) for member in pool.members}
    return "ibp+crown-ibp" if methods == {"ibp"} else "tightest"


def measure(
    pool: Pool,
    images: Images,
    threat: Threat,
    *,
    protocol: Protocol,
    parts: Parts,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Everything that the tables, figure 3 and a manifest say of a pool, as plain values.

    Args:
        pool: the members, as they are stored (see `reproduce.zoo` for the rounding).
        images: of the three splits.
        threat: the set.
        protocol: bounds, attack, device.
        parts: where finished parts are kept; those of another pool, threat, method or data are never taken up.
        progress: told what is being done, steps done, and steps in all.
    """
    method = protocol.bounds or suited_bounds(pool)
    device = protocol.chosen_device
    networks = [model.to(device).eval() for model in pool.models]
    facts = {
        "format": FORMAT,
        "threat": str(threat),
        "eps": threat.eps,
        "bounds": method,
        "fit": _about(images.fit),
        "test": _about(images.test),
        "train": None if images.train is None else _about(images.train),
    }
    mine = parts
    if parts.folder is not None:
        members = [parameter_digest(model) for model in pool.models]
        key = identity(**facts, part=_PART.get(device.type), members=members, code=package_digest())
        mine = Parts(parts.folder / key)
    check_pool(networks, images.test.images, images.test.labels, list(pool.names))
    fit = mine.values("fit", lambda: _fit(pool, networks, images.fit, threat, stages(method)[0], mine, progress))
    mixes = _mixes(pool.names, fit)
    stacked = list(mixes.values())
    test = _proof(networks, images.test, threat, stacked, method, mine, progress, device)
    train = None
    if images.train is not None:
        train = _proof(networks, images.train, threat, stacked, method, mine, progress, device)
    count = len(networks)
    best = max(range(count), key=lambda t: fit["certified"][t])
    rows = _rows(pool, mixes, fit, test, train)
    attacked = ("uniform", "RobBoost", pool.names[best])
    for name in attacked if protocol.attack is not None else ():
        assert protocol.attack is not None
        position = list(mixes).index(name)
        rows[name]["attack"] = _attacked(
            networks, mixes[name], images.test, threat, protocol.attack, test.certified[position], mine, name, progress
        )
    names = list(mixes)
    fails = {name: ~test.certified[names.index(name)] for name in attacked}
    ours = names.index("RobBoost")
    margins = {name: test.margins[names.index(name)] for name in ("uniform", "RobBoost")}
    return {
        **facts,
        "precision": f"float32, margins summed in float64, {test.rechecked} close calls bounded in float64",
        "later": dict(zip(mixes, test.later.tolist(), strict=True)),
        "names": list(pool.names),
        "best_single": pool.names[best],
        "weights": fit["weights"],
        "scales": fit["scales"],
        "kappa": fit["kappa"],
        "chosen": fit["chosen"],
        "gap": fit["gap"],
        "rows": rows,
        "some_member": _share(~test.certified[:count].any(0)),
        "tests": {
            "RobBoost against best single": paired_test(fails["RobBoost"], fails[pool.names[best]]).to_dict(),
            "RobBoost against uniform": paired_test(fails["RobBoost"], fails["uniform"]).to_dict(),
        },
        "eliminated": {
            split: eliminated(proof.margins[:count], proof.margins[ours])
            for split, proof in (("train", train), ("test", test))
            if proof is not None
        },
        "histogram": histogram(margins),
        "certified": {name: packed(~mask) for name, mask in fails.items()},
        "attack": None if protocol.attack is None else asdict(protocol.attack),
        "versions": {"robboost": robboost.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
    }


def _about(data: Dataset) -> dict[str, Any]:
    return {"name": data.name, "split": data.split, "images": len(data), "sha256": data.sha256()}


def _fit(
    pool: Pool,
    networks: list[nn.Module],
    data: Dataset,
    threat: Threat,
    method: str,
    parts: Parts,
    progress: Progress | None,
) -> dict[str, Any]:
    """Weights and scales, and how many of the fit images each mix certifies: to choose by."""
    members = dict(zip(pool.names, networks, strict=True))
    device = next(networks[0].parameters()).device
    x, y = data.images.to(device), data.labels.to(device)
    bounds: PoolBounds | StoredBounds
    store = None
    keep = parts.folder is not None and device.type == "cpu" and len(data) > _STORE_FROM
    if keep and find_spec("zarr") is not None:
        assert parts.folder is not None
        store = parts.folder / "fit-bounds"
        settings = FillSettings(method=method, storage="float16")
        filled = fill_store(str(store), networks, (x, y), threat, settings=settings, progress=progress)
        bounds = stored_bounds(filled, networks, (x, y))
    else:
        bounds = pool_bounds(networks, x, y, threat, method=method, progress=_say(progress, "fit"))
    fitted = RobBoost(threat, bounds=method).fit_bounds(members, bounds, progress=progress)
    # Those of the ensemble that is handed out, in the order of the pool.
    weights = dict(zip(fitted.ensemble.names, fitted.ensemble.weights.tolist(), strict=True))
    result = {
        "weights": [weights.get(name, 0.0) for name in pool.names],
        "scales": fitted.scales.tolist(),
        "kappa": fitted.kappa_,
        "chosen": fitted.chosen.name,
        "gap": fitted.solution.gap,
    }
    mixes = torch.stack(list(_mixes(pool.names, result).values()))
    lower = bounds.lower(mixes)
    correct = torch.stack([bounds.correct(mix) for mix in mixes]).to(lower.device)
    result["certified"] = ((lower > 0).all(2) & correct).sum(1).tolist()
    result["images"] = len(data)
    if store is not None:
        shutil.rmtree(store)
    return result


def _mixes(names: Sequence[str], fit: Mapping[str, Any]) -> dict[str, Tensor]:
    """Coefficients weight / scale [T] of each member alone, of the uniform average, and of the fitted mix."""
    if taken := {"uniform", "RobBoost"} & set(names):
        raise InputError(f"a member is named {min(taken)!r}: expected another name, that one belongs to the mix")
    scales = torch.tensor(fit["scales"], dtype=torch.float64)
    units = torch.eye(len(names), dtype=torch.float64) / scales
    rows = dict(zip(names, units, strict=True))
    rows["uniform"] = torch.full((len(names),), 1 / len(names), dtype=torch.float64) / scales
    rows["RobBoost"] = torch.tensor(fit["weights"], dtype=torch.float64) / scales
    return rows


def _proof(
    networks: list[nn.Module],
    data: Dataset,
    threat: Threat,
    mixes: list[Tensor],
    method: str,
    parts: Parts,
    progress: Progress | None,
    device: torch.device,
) -> Proof:
    """`prove` in parts that are kept; on the CPU."""
    found: list[dict[str, Tensor]] = []
    step = _PART.get(device.type, 500)
    for start in range(0, len(data), step):
        x, y = data.images[start : start + step].to(device), data.labels[start : start + step].to(device)

        def compute(x: Tensor = x, y: Tensor = y, start: int = start) -> dict[str, Tensor]:
            def tell(what: str, done: int, _total: int) -> None:
                if progress is not None:
                    progress(f"{data.split}: {what}", start + done, len(data))

            proof = prove(networks, x, y, threat, mixes, method=method, progress=tell)
            return {
                "margins": proof.margins,
                "certified": proof.certified,
                "correct": proof.correct,
                "rechecked": torch.tensor(proof.rechecked),
                "later": proof.later,
            }

        found.append({key: value.cpu() for key, value in parts.arrays(f"{data.split}-{start}", compute).items()})
    margins, certified, correct = (
        torch.cat([part[key] for part in found], 1) for key in ("margins", "certified", "correct")
    )
    later = torch.stack([part["later"] for part in found]).sum(0)
    return Proof(margins, certified, correct, sum(int(part["rechecked"]) for part in found), later)


def _rows(
    pool: Pool, mixes: Mapping[str, Tensor], fit: Mapping[str, Any], test: Proof, train: Proof | None
) -> dict[str, dict[str, Any]]:
    sizes = torch.tensor([float32_bytes(model) / 1e6 for model in pool.models], dtype=torch.float64)
    rows = {}
    for n, (name, mix) in enumerate(mixes.items()):
        used = mix > 0
        rows[name] = {
            "verified_test": _share(~test.certified[n]),
            "verified_train": None if train is None else _share(~train.certified[n]),
            "verified_fit": Share(fit["images"] - fit["certified"][n], fit["images"]).to_dict(),
            "targeted_test": 1 - float((test.margins[n] > 0).to(torch.float64).mean()),
            "clean": _share(~test.correct[n]),
            "attack": None,
            "megabytes": float(sizes[used].sum()),
            "members": int(used.sum()),
        }
    return rows


def _attacked(
    networks: list[nn.Module],
    mix: Tensor,
    data: Dataset,
    threat: Threat,
    settings: AttackSettings,
    certified: Tensor,
    parts: Parts,
    name: str,
    progress: Progress | None,
) -> dict[str, Any]:
    """Error under attack; a success on a certified image raises SoundnessError."""
    network = Ensemble(networks, mix / mix.sum()).pruned()
    device = next(networks[0].parameters()).device
    batch = min(settings.batch_size, _ATTACK_BATCH["cpu"])
    if device.type == "cuda":
        batch = _ATTACK_BATCH["cuda"]
    chosen = replace(settings, batch_size=batch)
    key = identity(name=name, mix=mix.tolist(), settings=asdict(chosen))
    fooled = []
    for start in range(0, len(data), batch):
        part = slice(start, start + batch)

        def compute(part: slice = part) -> dict[str, Tensor]:
            x, y = data.images[part].to(device), data.labels[part].to(device)
            safe = certified[part].to(device)
            return {"success": attack(network, x, y, threat, settings=chosen, certified=safe).success}

        fooled.append(parts.arrays(f"attack-{key}-{start}", compute)["success"].cpu())
        if progress is not None:
            progress(f"attack on {name}", min(start + batch, len(data)), len(data))
    return _share(torch.cat(fooled))


def _share(mask: Tensor) -> dict[str, Any]:
    return Share(int(mask.sum()), len(mask)).to_dict()


def _say(progress: Progress | None, part: str) -> Progress | None:
    if progress is None:
        return None
    tell = progress
    return lambda what, done, total: tell(f"{part}: {what}", done, total)
