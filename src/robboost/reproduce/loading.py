"""What the commands read: trained pools, whatever wrote them, and the images that belong to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from robboost.data import Dataset, load_dataset
from robboost.errors import InputError
from robboost.models import Ensemble, Pool, PoolMember, load_model, read_metadata, read_pool
from robboost.reproduce.measure import Images
from robboost.threat import Threat

__all__ = ["images_of", "read_run", "threat_of"]


def read_run(path: Path) -> Pool:
    """The members of a training run's folder, of a pool, or of an ensemble's file."""
    if path.is_dir():
        return read_pool(path)
    model = load_model(path)
    stated = read_metadata(path)
    if not isinstance(model, Ensemble):
        return read_pool(path)
    members = tuple(
        PoolMember(str(name), member, stated.input_shape, file=str(path), num_classes=stated.num_classes)
        for name, member in zip(model.names, model.members, strict=True)
    )
    return Pool(members, stated.notes)


def threat_of(pool: Pool, eps: str | None = None) -> Threat:
    """l_inf within the box of pixels: the radius given, else the one that the manifest or the members state."""
    if eps is not None:
        return Threat(eps, clip=(0.0, 1.0))
    stated = pool.notes.get("threat")
    radius = stated.get("eps") if isinstance(stated, Mapping) else pool.notes.get("eps")
    if radius is None:
        radii = {member.config.get("eps") for member in pool.members}
        radius = radii.pop() if len(radii) == 1 else None
    if radius is None:
        raise InputError("--eps is missing and the pool states no one radius: expected one such as 0.1 or 8/255")
    return Threat(radius, clip=(0.0, 1.0))


def images_of(
    notes: Mapping[str, Any],
    *,
    dataset: str | None = None,
    limit: int | None = None,
    train_images: int | None = None,
    fit_split: str = "heldout",
) -> Images:
    """The images of all splits.

    Args:
        notes: of the pool; its data set is taken where `dataset` is None.
        dataset: name of a data set.
        limit: the first so many of the fit and test images, and so many training images.
        train_images: so many training images, evenly spaced over the split; None: all.
        fit_split: where the weights are fitted; the paper: "train", for which the same images are taken.
    """
    name = dataset or notes.get("dataset")
    if not isinstance(name, str):
        raise InputError("--data is missing and the pool names no data set: expected one such as mnist or cifar10")
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: expected at least 1")
    wanted = train_images if limit is None else min(limit, limit if train_images is None else train_images)
    train = _spaced(load_dataset(name, split="train"), wanted)
    if fit_split == "train":
        if train is None:
            raise InputError("--train-images 0 with --fit-split train: expected images to fit on")
        fit = train
    else:
        fit = load_dataset(name, split=fit_split).at_most(limit)
    return Images(fit=fit, test=load_dataset(name, split="test").at_most(limit), train=train)


def _spaced(data: Dataset, count: int | None) -> Dataset | None:
    if count is None or count >= len(data):
        return data
    if count < 0:
        raise InputError(f"--train-images {count}: expected 0 or more")
    return data.take(torch.arange(count) * len(data) // count) if count else None
