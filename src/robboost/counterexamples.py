"""What is kept when a proof is contradicted: points, images, network and settings, enough to see it again."""

from __future__ import annotations

import copy
import json
import platform
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robboost.errors import RobBoostError
from robboost.models import save_model

__all__ = ["Counterexample", "save_counterexample"]


@dataclass(frozen=True, eq=False)
class Counterexample:
    """K examples that were certified and fooled all the same.

    Attributes:
        index: [K], positions among the examples that were handed in.
        point: [K, *input], float64, inside the threat set.
        image: [K, *input], the examples themselves.
        label: [K]; margin: [K], true logit minus the largest other at the point, in float64, not above zero.
    """

    index: Tensor
    point: Tensor
    image: Tensor
    label: Tensor
    margin: Tensor


def save_counterexample(model: nn.Module, found: Counterexample, about: Mapping[str, Any]) -> str:
    """Writes robboost-counterexample-INDEX.npz and the network as .safetensors beside it; says what went where.

    In the folder that one is in, or, where that cannot be written, among the temporary files. The .npz holds the
    fields of `Counterexample` and `about` as JSON with the versions, the device and the arithmetic added.
    """
    import robboost

    facts = {
        **about,
        "robboost": robboost.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": str(found.image.device),
        "dtype": str(found.image.dtype),
    }
    arrays = {name: value.detach().cpu().numpy() for name, value in vars(found).items()}
    name = f"robboost-counterexample-{int(found.index[0])}"
    reason = ""
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        path = folder / f"{name}.npz"
        try:
            np.savez(path, about=np.array(json.dumps(facts, default=str)), **arrays)
        except OSError as error:
            reason = error.strerror or str(error)
            with suppress(OSError):
                path.unlink(missing_ok=True)  # half of it is no evidence
            continue
        return f"point and image saved in {path}, {_save_network(model, path, tuple(found.image.shape[1:]))}"
    return f"point not saved: {reason}"


def _save_network(model: nn.Module, path: Path, input_shape: tuple[int, ...]) -> str:
    try:
        # As it was attacked: in evaluation mode.
        save_model(copy.deepcopy(model).eval(), path.with_suffix(".safetensors"), input_shape=input_shape)
    except (RobBoostError, OSError) as error:
        return f"network not saved ({error})"
    return f"network in {path.with_suffix('.safetensors').name}"
