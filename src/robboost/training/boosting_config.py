"""What an ensemble is boosted with: its members' configurations in order, and how they are added up."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from robboost.errors import InputError
from robboost.threat import Threat
from robboost.training.boosting_bounds import STORAGE
from robboost.training.boosting_member import BOUNDS, Objective
from robboost.training.config import TrainConfig, pool_of, read_table
from robboost.training.losses import ESTIMATING

__all__ = ["BoostConfig", "load_boost"]

_RECIPES = Path(__file__).parent / "boosting_recipes"
_FROZEN = ("auto", "stored", "recomputed")
_REWEIGHT = ("none", "exact")


@dataclass(frozen=True)
class BoostConfig:
    """Members that are trained one after another, each for the ensemble of those before it (paper, section 3.5).

    Attributes:
        name: folder of the run.
        dataset: name of the data set.
        stages: one configuration a member, its method one of `BOUNDS`; radius schedules are each stage's own.
        objective: surrogate of the ensemble's margins.
        frozen: "stored": the sum of earlier bounds is kept for every training image, which must then stay as it is (no
            shift, no flip). "recomputed": it is worked out for each batch, augmented or not. "auto": stored where no
            stage moves its images and the rows fit into the budget, else recomputed.
        storage: "float16" or "float32", of the stored sum.
        budget: bytes that the stored sum may take.
        bounds: method of the certificate on held-out images; "": what suits the members' training.
        reweight: "none": every member is added with weight one (the paper). "exact": after each stage the weights are
            fitted on the held-out images, and the next stage starts from that mix.
        patience: stages without a lower held-out verified error after which no more are trained; 0: all are.
    """

    name: str
    dataset: str
    stages: tuple[TrainConfig, ...]
    objective: Objective = field(default_factory=Objective)
    frozen: str = "auto"
    storage: str = "float16"
    budget: int = 8 * 2**30
    bounds: str = ""
    reweight: str = "none"
    patience: int = 0

    def __post_init__(self) -> None:
        for name, known in (("frozen", _FROZEN), ("storage", tuple(STORAGE)), ("reweight", _REWEIGHT)):
            if getattr(self, name) not in known:
                raise InputError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(known)}")
        for name, lowest in (("budget", 1), ("patience", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < lowest:
                raise InputError(f"{name}={value!r}: expected a whole number from {lowest}")
        if not self.stages:
            raise InputError("stages=(): expected at least one member")
        if len({stage.eps for stage in self.stages}) > 1:
            raise InputError(f"eps={sorted({s.eps for s in self.stages})}: expected one radius for all members")
        for stage in self.stages:
            if stage.method not in BOUNDS:
                raise InputError(f"method={stage.method!r}: expected one of {', '.join(BOUNDS)} (boosting needs lines)")
            if stage.method in ESTIMATING and stage.crown_share != 1:
                raise InputError(f"crown_share={stage.crown_share:g}: expected 1 for method {stage.method!r}")
            if self.frozen == "stored" and (stage.shift or stage.flip):
                raise InputError(
                    "shift and flip: expected neither, because stored bounds belong to the images as they are"
                    " (frozen='recomputed' allows both)"
                )
        # Labels that name the files of a stage, and tell two members of one architecture apart.
        named = [
            replace(stage, pool=self.name, name=f"{number}-{_short(stage)}")
            for number, stage in enumerate(self.stages, start=1)
        ]
        object.__setattr__(self, "stages", tuple(named))

    @property
    def threat(self) -> Threat:
        """What is certified: the radius eps (not train_eps), cut by the box of pixels."""
        return Threat(self.stages[0].eps, clip=(0.0, 1.0))

    @property
    def frozen_method(self) -> str:
        """Bounds of the frozen members: by intervals where all are trained so, else the better of both."""
        methods = {stage.method for stage in self.stages}
        return BOUNDS["ibp"] if methods == {"ibp"} else BOUNDS["crown-ibp"]

    @property
    def certificate(self) -> str:
        return self.bounds or BOUNDS["crown-ibp"]

    @property
    def augments(self) -> bool:
        """Whether a stage moves or mirrors its images."""
        return any(stage.shift or stage.flip for stage in self.stages)

    def with_epochs(self, epochs: int) -> BoostConfig:
        """The same stages over `epochs` each: the schedules keep their shape."""
        return replace(self, stages=tuple(stage.with_epochs(epochs) for stage in self.stages))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("stages", "objective")}
        return own | {"objective": vars(self.objective), "stages": [stage.as_dict() for stage in self.stages]}


def load_boost(path: str | Path) -> BoostConfig:
    """A configuration from a .toml or .json file, or a shipped one ("mnist-0.3", "cifar10-2-255").

    The file is that of a pool (name, dataset, defaults, members: here the stages in order), and may hold a table
    `boosting` with further attributes of `BoostConfig`, and surrogate and kappa.
    """
    file = Path(path)
    if not file.exists() and (_RECIPES / f"{path}.toml").exists():
        file = _RECIPES / f"{path}.toml"
    raw = {"name": file.stem} | read_table(file)
    own = raw.pop("boosting", {})
    known = {f.name for f in fields(BoostConfig)} - {"name", "dataset", "stages", "objective"} | {"surrogate", "kappa"}
    if not isinstance(own, dict) or set(own) - known:
        raise InputError(f"{path}: boosting={own!r}: expected a table with some of {', '.join(sorted(known))}")
    objective = Objective(**{name: own.pop(name) for name in ("surrogate", "kappa") if name in own})
    members = raw.get("members")
    if isinstance(members, list):
        raw["members"] = [
            member | {"name": f"{number}"} if isinstance(member, dict) else member
            for number, member in enumerate(members, start=1)
        ]
    pool = pool_of(raw, str(path))
    return BoostConfig(pool.name, pool.dataset, pool.members, objective=objective, **own)


def _short(stage: TrainConfig) -> str:
    return stage.architecture if stage.architecture.isalnum() and len(stage.architecture) <= 10 else "net"
