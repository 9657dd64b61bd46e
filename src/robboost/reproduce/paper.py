"""The figures that the paper reports (arXiv 1910.14655), as data, with the place of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["BOOSTED", "ELIMINATED", "MAIN", "SUBSAMPLED", "Boosted", "Eliminated", "MainRow", "Subsampled"]

Setting = str


@dataclass(frozen=True)
class Eliminated:
    """A row of the paper's table 1, section 4 "Data Elimination": percent of the training examples."""

    robust_to_all: float
    robust_to_none: float


@dataclass(frozen=True)
class MainRow:
    """A row of the paper's table 2, section 4, all in percent but the size in MB (1e6 bytes).

    Its clean and PGD columns are multiples of 1/256: errors of 256 images, not of the test set.
    """

    verified_train: float
    verified_test: float
    clean: float
    pgd: float
    megabytes: float


@dataclass(frozen=True)
class Subsampled:
    """A pair of rows of the paper's table 3, section 4, in percent: five members, then naive, then RobBoost."""

    clean: tuple[float, ...]
    verified: tuple[float, ...]


@dataclass(frozen=True)
class Boosted:
    """Section 4 "Gradient Boosting": verified test error in percent of the first member, and of the ensemble."""

    first: float
    ensemble: float


ELIMINATED: Mapping[Setting, Eliminated] = {
    "mnist-0.1": Eliminated(97.67, 0.07),
    "mnist-0.2": Eliminated(91.85, 0.42),
    "mnist-0.3": Eliminated(69.69, 2.84),
    "cifar10-2-255": Eliminated(65.60, 3.97),
    "cifar10-8-255": Eliminated(56.23, 14.11),
}

MAIN: Mapping[Setting, Mapping[str, MainRow]] = {
    "mnist-0.1": {
        "uniform": MainRow(3.55, 4.56, 0.39, 1.56, 9.1),
        "RobBoost": MainRow(2.65, 4.47, 0.39, 1.17, 5.3),
    },
    "mnist-0.2": {
        "uniform": MainRow(13.82, 13.66, 2.34, 3.91, 9.1),
        "RobBoost": MainRow(12.41, 12.58, 1.95, 3.12, 7.4),
    },
    "mnist-0.3": {
        "uniform": MainRow(39.22, 38.60, 11.33, 19.92, 9.1),
        "RobBoost": MainRow(37.42, 36.61, 9.77, 19.53, 5.7),
    },
    "cifar10-2-255": {
        "uniform": MainRow(50.02, 51.68, 38.28, 45.31, 10.0),
        "RobBoost": MainRow(47.27, 49.51, 34.77, 41.80, 6.1),
    },
    "cifar10-8-255": {
        "uniform": MainRow(74.95, 74.50, 62.89, 71.09, 10.0),
        "RobBoost": MainRow(74.56, 74.27, 60.94, 69.14, 5.6),
    },
}

SUBSAMPLED: Mapping[Setting, Subsampled] = {
    "mnist-0.3": Subsampled(
        clean=(12.96, 13.99, 23.88, 12.77, 18.50, 13.34, 12.51),
        verified=(42.98, 45.3, 51.62, 45.13, 49.32, 43.94, 42.84),
    ),
    "cifar10-2-255": Subsampled(
        clean=(42.33, 42.15, 41.77, 42.43, 41.86, 40.79, 40.77),
        verified=(55.00, 55.11, 54.97, 54.73, 55.07, 53.61, 53.61),
    ),
}

BOOSTED: Mapping[Setting, Boosted] = {
    "mnist-0.3": Boosted(39.8, 34.6),
    "cifar10-2-255": Boosted(51.18, 49.55),
}
