"""What a member is trained with: one frozen value, checked once, read from TOML or JSON files."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from robboost.errors import InputError
from robboost.training.losses import ESTIMATING, METHODS

__all__ = ["PoolConfig", "TrainConfig", "load_config", "load_pool", "pool_of", "read_table", "recipe"]

_RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class TrainConfig:
    """One member's training. Schedules are shares of the run, so that a longer run keeps their shape.

    Attributes:
        architecture: name or structure text for `build`.
        method: one of `losses.METHODS`.
        eps: the radius that the member is meant for (a number, or text such as "8/255").
        train_eps: the radius at the end of the ramp; None: eps. Interval training gains from a little more than eps.
        epochs, batch, lr, seed: as usual; lr is constant until the ramp ends, then falls along a cosine to lr_end * lr.
        warmup: share of the run with radius 0.
        ramp: share of the run in which the radius then grows to train_eps (slowly at first).
        mixture: weight of the worst-case loss after the ramp; it starts at mixture_start and moves with the radius.
            For the mixture family the rest is the adversarial loss, for the other certified methods the natural one.
        crown_share: for "crown-ibp" and its kin, weight of the linear bound ("fused-crown-ibp": of its loss) against
            the interval bound after the ramp (from 1).
        small_box: for "sabr", radius of the propagated box as a share of the radius.
        attack_steps, attack_scale: steps of the attack, and its radius as a multiple of the training radius.
        batch_norm: normalise behind every convolution; folded into the saved network.
        init: "interval" (standard deviation sqrt(2 pi) / fan_in) or "default" (PyTorch's).
        clip_norm: longest gradient; 0: not clipped.
        l1: weight of the sum of |weights| in the loss.
        average: decay of the weight average that is saved, from the end of the ramp on; 0: the last weights.
        shift, flip: augmentation by moves of up to `shift` pixels, and by mirror images.
        pixel_share: share of the pixels that the member sees (a fixed random mask inside the network); 1: all.
        projections: for "wong-kolter", random projections per layer that ESTIMATE its l_1 norms; 0: exact bounds.
        name: name of the saved member; empty: made of architecture, method and seed.
        pool: the pool that it belongs to: the folder, below the run's, that its files go to.
    """

    architecture: str
    method: str = "ibp"
    eps: float = 0.1
    train_eps: float | None = None
    epochs: int = 60
    batch: int = 256
    lr: float = 5e-4
    lr_end: float = 0.01
    seed: int = 0
    warmup: float = 0.02
    ramp: float = 0.5
    mixture: float = 1.0
    mixture_start: float | None = None
    crown_share: float = 0.0
    small_box: float = 0.4
    attack_steps: int = 1
    attack_scale: float = 1.0
    batch_norm: bool = False
    init: str = "interval"
    clip_norm: float = 10.0
    l1: float = 0.0
    average: float = 0.0
    shift: int = 0
    flip: bool = False
    pixel_share: float = 1.0
    projections: int = 0
    name: str = ""
    pool: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _checked_type(field.name, str(field.type), getattr(self, field.name)))
        if self.method not in METHODS:
            raise InputError(f"method={self.method!r}: expected one of {', '.join(METHODS)}")
        if self.init not in ("interval", "default"):
            raise InputError(f"init={self.init!r}: expected 'interval' or 'default'")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InputError(f"{name}={value:g}: expected a number from {low:g} to {high:g}")
        if self.warmup + self.ramp > 1:
            raise InputError(
                f"warmup={self.warmup:g} and ramp={self.ramp:g}: expected shares of the run that add up to at most 1"
            )
        if self.projections and self.method != "wong-kolter":
            raise InputError(f"projections={self.projections}: expected 0 for method {self.method!r}")
        if self.lr <= 0:
            raise InputError(f"lr={self.lr:g}: expected a number above 0")
        for value in (self.name, self.pool):
            if value and not (value[0].isalnum() and all(c.isalnum() or c in "._-" for c in value)):
                raise InputError(f"name={value!r}: expected letters, digits, '.', '_' and '-' alone (it names a file)")

    @property
    def final_eps(self) -> float:
        """The radius after the ramp."""
        return self.eps if self.train_eps is None else self.train_eps

    @property
    def estimated(self) -> bool:
        """Whether the bounds of the training loss are estimates: what the log calls robust is then no bound."""
        return self.projections > 0 or self.method in ESTIMATING

    @property
    def short_name(self) -> str:
        """`name`, or one made of architecture, method and seed."""
        short = self.architecture if len(self.architecture) <= 10 and self.architecture.isalnum() else "net"
        return self.name or f"{short}-{self.method}-{self.seed}"

    @property
    def label(self) -> str:
        """ "POOL/NAME", or the name alone: where the member's files are."""
        return f"{self.pool}/{self.short_name}" if self.pool else self.short_name

    def with_epochs(self, epochs: int) -> TrainConfig:
        """The same run over `epochs`: the schedules keep their shape."""
        return replace(self, epochs=epochs)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `TrainConfig(**config.as_dict())` is equal to it."""
        return asdict(self)


@dataclass(frozen=True)
class PoolConfig:
    """Members that are trained side by side on one data set."""

    name: str
    dataset: str
    members: tuple[TrainConfig, ...]


_RANGES: list[tuple[str, float, float]] = [
    ("eps", 0, 1),
    ("train_eps", 0, 1),
    ("epochs", 1, 10_000),
    ("batch", 2, 65_536),
    ("lr", 0, 1),
    ("lr_end", 0, 1),
    ("seed", 0, 2**31 - 1),
    ("warmup", 0, 1),
    ("ramp", 0, 1),
    ("mixture", 0, 1),
    ("mixture_start", 0, 1),
    ("crown_share", 0, 1),
    ("small_box", 0, 1),
    ("attack_steps", 1, 200),
    ("attack_scale", 0, 10),
    ("clip_norm", 0, float("inf")),
    ("l1", 0, 1),
    ("average", 0, 0.999999),
    ("shift", 0, 16),
    ("pixel_share", 0.01, 1),
    ("projections", 0, 10_000),
]


def load_config(path: str | Path) -> TrainConfig:
    """One member's configuration from a .toml or .json file."""
    return _config(read_table(Path(path)), str(path))


def load_pool(path: str | Path) -> PoolConfig:
    """A pool from a .toml or .json file, or the name of a shipped recipe: name, dataset, defaults and members.

    Every entry of `members` is laid over `defaults`.
    """
    file = Path(path)
    if not file.exists() and (_RECIPES / f"{path}.toml").exists():
        file = _RECIPES / f"{path}.toml"
    return pool_of({"name": file.stem} | read_table(file), str(path))


def pool_of(raw: Mapping[str, Any], path: str) -> PoolConfig:
    """The pool of a table read from `path`."""
    unknown = sorted(set(raw) - {"name", "dataset", "defaults", "members"})
    members = raw.get("members")
    if unknown or not isinstance(members, list) or not members:
        raise InputError(f"{path}: expected name, dataset, defaults and a list of members, got {sorted(raw)}")
    if not isinstance(raw.get("dataset"), str):
        raise InputError(f"{path}: dataset={raw.get('dataset')!r}: expected the name of a data set")
    defaults = raw.get("defaults", {})
    name = str(raw["name"])
    configs = tuple(_config({**defaults, **member, "pool": name}, path) for member in members)
    labels = [config.label for config in configs]
    if len(set(labels)) < len(labels):
        twice = max(labels, key=labels.count)
        raise InputError(f"{path}: two members are called {twice!r}; expected a name or a seed that tells them apart")
    return PoolConfig(name, raw["dataset"], configs)


def recipe(name: str) -> PoolConfig:
    """A pool that ships with the package, such as "mnist-0.3"."""
    known = sorted(file.stem for file in _RECIPES.glob("*.toml"))
    if name not in known:
        raise InputError(f"recipe {name!r}: expected one of {', '.join(known)}")
    return load_pool(_RECIPES / f"{name}.toml")


def read_table(path: Path) -> dict[str, Any]:
    """The named values of a .toml or .json file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); expected a .toml or .json configuration") from None
    try:
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise InputError(f"{path}: {error}; expected a valid .toml or .json configuration") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: holds a {type(raw).__name__}; expected named values")
    return raw


def _config(raw: Mapping[str, Any], path: str) -> TrainConfig:
    known = {field.name for field in fields(TrainConfig)}
    unknown = sorted(set(raw) - known)
    if unknown:
        raise InputError(f"{path}: unknown entry {unknown[0]!r}; expected some of {', '.join(sorted(known))}")
    if "architecture" not in raw:
        raise InputError(f"{path}: no architecture; expected a name such as 'A' or a structure text")
    return TrainConfig(**raw)


def _checked_type(name: str, kind: str, value: Any) -> Any:
    """The value in its type: 1 is also a float, "8/255" is one too, true is no number."""
    if value is None and "None" in kind:
        return None
    if kind == "bool" or isinstance(value, bool):
        if kind == "bool" and isinstance(value, bool):
            return value
        raise InputError(f"{name}={value!r}: expected {'true or false' if kind == 'bool' else kind}")
    if kind == "int":
        if isinstance(value, int):
            return value
        raise InputError(f"{name}={value!r}: expected a whole number")
    if kind == "str":
        if isinstance(value, str):
            return value
        raise InputError(f"{name}={value!r}: expected text")
    try:
        number = float(Fraction(value.replace(" ", ""))) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, ZeroDivisionError):
        raise InputError(f"{name}={value!r}: expected a number or a fraction such as '8/255'") from None
    if number != number:
        raise InputError(f"{name}={value!r}: expected a number, not NaN")
    return number
