"""What a reproduction is asked for, the same from the command line and from `python -m robboost.reproduce`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from robboost.attacks import AttackSettings
from robboost.data import load_dataset
from robboost.errors import InputError
from robboost.mixtures import Progress
from robboost.models import Pool, read_pool
from robboost.models.pools import MANIFEST
from robboost.reproduce.loading import images_of, threat_of
from robboost.reproduce.measure import Protocol, measure
from robboost.reproduce.parts import Parts
from robboost.reproduce.zoo import read_results
from robboost.training import RunOptions, load_pool, train_pool
from robboost.training.manifest import save_pool

__all__ = ["Request", "figures_of", "measured", "train_recipe"]

_RECIPES = Path(__file__).parent / "recipes"
# Images of the training split that the train columns are measured on.
_TRAIN_IMAGES = 5000


@dataclass(frozen=True)
class Request:
    """Options that the commands share.

    Attributes:
        pools: folder with one folder per trained pool.
        train: train the pools that are missing there first.
        settings: names of the settings; none: all.
        out: where results go.
        work: where finished parts of long work are kept; None: below the user's `out`.
        data: data set in place of the pools' own.
        eps: radius in place of the pools' own.
        bounds: method of all bounds; "": what suits each pool.
        limit: so many images of each split.
        train_images: so many training images for the train columns; 0: none.
        fit_split: "heldout", or "train" as in the paper.
        steps, restarts: of the attack; 0 steps: none.
        members: of a zoo pool, "all" or "used".
        minutes, epochs: limits of training.
        device: "cpu", "cuda", ...; None: the GPU where there is one.
        fresh: measure again, even where results lie beside a pool.
    """

    pools: Path = Path("zoo")
    train: bool = False
    settings: tuple[str, ...] = ()
    out: Path | None = None
    work: Path = Path(".robboost-reproduce")
    data: str | None = None
    eps: str | None = None
    bounds: str = ""
    limit: int | None = None
    train_images: int = _TRAIN_IMAGES
    fit_split: str = "heldout"
    steps: int = 40
    restarts: int = 2
    members: str = "all"
    minutes: float | None = None
    epochs: int | None = None
    device: str | None = None
    fresh: bool = False

    @property
    def attack(self) -> AttackSettings | None:
        return None if self.steps == 0 else AttackSettings(steps=self.steps, restarts=self.restarts)

    @property
    def plain(self) -> bool:
        """Whether results that lie beside a pool answer it."""
        asked = (self.data, self.eps, self.bounds, self.limit, self.fit_split, self.fresh)
        return asked == (None, None, "", None, "heldout", False)


def measured(pool: Pool, request: Request, progress: Progress | None) -> dict[str, Any]:
    """The figures of a pool under the request's protocol; finished parts are kept and taken up."""
    images = images_of(
        pool.notes,
        dataset=request.data,
        limit=request.limit,
        train_images=request.train_images,
        fit_split=request.fit_split,
    )
    protocol = Protocol(request.bounds, request.attack, request.device)
    threat = threat_of(pool, request.eps)
    return measure(pool, images, threat, protocol=protocol, parts=Parts(request.work), progress=progress)


def figures_of(name: str, request: Request, progress: Progress | None) -> dict[str, Any] | None:
    """The figures of POOLS/NAME: those beside it, or measured now; None where there is no such pool."""
    folder = request.pools / name
    if not (folder / MANIFEST).exists():
        if not request.train:
            return None
        train_recipe(name, request, progress)
    pool = read_pool(folder)
    found = read_results(folder, pool) if request.plain else None
    return found or {"name": name, **measured(pool, request, progress)}


def train_recipe(name: str, request: Request, progress: Progress | None) -> Path:
    """Trains the recipe NAME into POOLS/NAME; a run found there goes on."""
    own = _RECIPES / f"{name}.toml"
    try:
        config = load_pool(own if own.exists() else name)
    except InputError:
        raise InputError(
            f"recipe {name!r} does not ship with this version, so that its pool cannot be trained; expected a pool in"
            f" {request.pools / name} (--pools), or fewer settings (--settings)"
        ) from None
    if request.epochs is not None:
        config = replace(config, members=tuple(member.with_epochs(request.epochs) for member in config.members))
    dataset = request.data or config.dataset
    data, heldout = (load_dataset(dataset, split=split) for split in ("train", "heldout"))
    if request.limit is not None:
        data, heldout = (part.take(min(request.limit, len(part))) for part in (data, heldout))
    trained = train_pool(
        config.members,
        data,
        heldout=heldout,
        options=RunOptions(out=request.pools, device=request.device, minutes=request.minutes),
        progress=None if progress is None else lambda p: progress(f"training {p.member}", p.epoch, p.epochs),
    )
    save_pool(request.pools / config.name, trained, data, entries={"eps": config.members[0].eps})
    return request.pools / config.name
