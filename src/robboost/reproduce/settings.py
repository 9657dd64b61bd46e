"""The five settings of the paper's section 4, and the pools that belong to them by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from robboost.errors import InputError
from robboost.threat import Threat

__all__ = ["SETTINGS", "Setting", "chosen_settings", "setting_of"]


@dataclass(frozen=True)
class Setting:
    """A data set and a radius. Pools are folders (and recipes) of these names.

    Attributes:
        name: also the name of our best pool.
        dataset: name of the data set.
        eps: radius as text.
        label: as it stands in a table.
    """

    name: str
    dataset: str
    eps: str
    label: str

    @property
    def threat(self) -> Threat:
        return Threat(self.eps, clip=(0.0, 1.0))

    @property
    def faithful(self) -> str:
        """The pool of the paper's architectures, trained by Wong and Kolter's bound."""
        return f"paper-{self.name}"

    @property
    def subsampled(self) -> str:
        """The pool of five networks K, each with its own 80% of the pixels."""
        return f"paper-{self.name}-subsampled"

    @property
    def boosted(self) -> str:
        """The run of boosting, and its recipe without "boost-"."""
        return f"boost-{self.name}"


SETTINGS: Mapping[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("mnist-0.1", "mnist", "0.1", "MNIST 0.1"),
        Setting("mnist-0.2", "mnist", "0.2", "MNIST 0.2"),
        Setting("mnist-0.3", "mnist", "0.3", "MNIST 0.3"),
        Setting("cifar10-2-255", "cifar10", "2/255", "CIFAR-10 2/255"),
        Setting("cifar10-8-255", "cifar10", "8/255", "CIFAR-10 8/255"),
    )
}


def chosen_settings(names: Sequence[str], known: Sequence[str] = tuple(SETTINGS)) -> tuple[Setting, ...]:
    """The settings named, or all that are `known` here."""
    for name in names:
        if name not in known:
            raise InputError(f"setting {name!r}: expected one of {', '.join(known)}")
    return tuple(SETTINGS[name] for name in (names or known))


def setting_of(pool: str) -> Setting | None:
    """The setting that a pool's name speaks of ("paper-mnist-0.3", "boost-mnist-0.3", ...)."""
    return next((setting for name, setting in SETTINGS.items() if name in pool), None)
