"""RobBoost: ensembles of neural networks whose robustness is proved.

The public names are loaded on first use, so that `import robboost` is fast and the numerical core needs only torch and
numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> module that defines it (below `robboost`). No module has the name of a public function: importing the
# module would put it in the function's place.
_PUBLIC: dict[str, str] = {
    "Attacked": "attacks",
    "Certificate": "certification",
    "CheckpointError": "errors",
    "Comparison": "comparison",
    "DataError": "errors",
    "DistributedError": "errors",
    "DivergedError": "errors",
    "Ensemble": "models",
    "InputError": "errors",
    "MarginBounds": "bounds",
    "RobBoost": "fitting",
    "RobBoostError": "errors",
    "Solution": "weights",
    "SoundnessError": "errors",
    "StoreError": "errors",
    "Threat": "threat",
    "UnsupportedOperationError": "errors",
    "attack": "attacks",
    "certify": "certification",
    "compare": "comparison",
    "load_dataset": "data",
    "load_model": "models",
    "margin_bounds": "bounds",
    "solve_weights": "weights",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'robboost' has no attribute {name!r}")
    value = getattr(import_module(f"robboost.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
