"""A trained pool of three tiny networks in a folder, as a training run leaves it, and its images as .npz."""

from dataclasses import replace

import numpy as np
from small_pools import SHAPE, examples, pool

from robboost.models import PoolMember, write_pool
from robboost.reproduce.request import Request

IMAGES = 48


def trained_run(folder, name="mnist-0.3"):
    """FOLDER/NAME, and FOLDER/images.npz; the pool's notes name no threat, only the radius."""
    members = [PoolMember(f"m{n}", model, SHAPE, config={"method": "ibp", "eps": 0.05}, seed=n)
               for n, model in enumerate(pool())]  # fmt: skip
    write_pool(folder / name, members, {"dataset": "mnist", "eps": 0.05})
    x, y = examples(IMAGES, 42)
    np.savez(folder / "images.npz", images=x.numpy(), labels=y.numpy())
    return folder / name


def quick(folder, **changes):
    """A request that a test can wait for."""
    request = Request(
        pools=folder, work=folder / "work", out=folder / "zoo", data=str(folder / "images.npz"), steps=3, restarts=1,
        device="cpu",
    )  # fmt: skip
    return replace(request, **changes)
