"""The small pool that ships with the package, for the demo, the documentation and a first try."""

from __future__ import annotations

from importlib.resources import as_file, files

from robboost.models.pools import Pool, read_pool

__all__ = ["demo_pool"]


def demo_pool() -> Pool:
    """Five small MNIST networks for l_inf 0.1, trained by intervals in a few CPU minutes: to try things, not a result.

    They were trained on MNIST's "train" split; "heldout" and "test" (also of "mnist-small") are new to them.
    """
    with as_file(files("robboost.models") / "demo_pool") as folder:
        return read_pool(folder)
