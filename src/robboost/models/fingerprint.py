"""What a module's forward can depend on besides the numbers in its parameters, so that a trace is never outdated.

A plain attribute (a factor, a constant tensor, a flag), a hook or a replaced submodule changes the function without
changing any parameter. Two fingerprints are equal only if none of these changed; what cannot be compared makes them
unequal, which costs a new trace and nothing else.
"""

from __future__ import annotations

import hashlib
import types
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["fingerprint"]

# What torch.nn.Module keeps for itself and forward does not read, or what is compared as a parameter or a submodule.
_INTERNAL = frozenset(
    {
        *("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"),
        *("_backward_hooks", "_backward_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
        *("_state_dict_hooks", "_state_dict_pre_hooks"),
    }
)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, type})
# Empty in nearly every module, and then not worth a mark.
_HOOKS = frozenset(key for key in vars(nn.Module()) if key.startswith("_forward"))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
# Attributes that are followed in one module, before it counts as not comparable.
_MOST = 4096


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """A value that differs after any change of structure, mode, shapes, plain attributes or forward hooks.

    Not seen: global variables and variables that a function has closed over.
    """
    return _Seen().module(model)


class _Same:
    """Equal to another of these only while both stand for the very same living object."""

    def __init__(self, value: object) -> None:
        try:
            self.value = weakref.ref(value)
        except TypeError:  # no weak references to this type
            self.value = lambda: value  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        mine = self.value()
        return isinstance(other, _Same) and mine is not None and mine is other.value()

    __hash__ = None  # type: ignore[assignment]


class _Seen:
    """Marks of attribute values; containers and plain objects are followed, each once."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}

    def module(self, model: nn.Module) -> tuple[Any, ...]:
        parts = []
        for name, part in model.named_modules():
            self.known.setdefault(id(part), len(self.known))
            own = [
                (key, value)
                for key, value in vars(part).items()
                if key not in _INTERNAL and not (key in _HOOKS and not value)
            ]
            marks = [(key, value if type(value) in _PLAIN else self.mark(value)) for key, value in own]
            parts.append((name, type(part), type(part).forward, part.training, part.extra_repr(), marks))
        parameters = tuple((name, tuple(value.shape)) for name, value in model.named_parameters())
        buffers = tuple((name, tuple(value.shape)) for name, value in model.named_buffers())
        return tuple(parts), parameters, buffers

    def mark(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return type(value), value
        if type(value) in (tuple, list) and _PLAIN.issuperset(map(type, value)):
            return type(value), tuple(value)
        if isinstance(value, Tensor):
            # Tensors made in inference mode do not count their changes: never equal.
            return object() if value.is_inference() else (_Same(value), value._version)
        if id(value) in self.known:
            return "again", self.known[id(value)]
        if len(self.known) >= _MOST:
            return object()
        self.known[id(value)] = len(self.known)
        if isinstance(value, dict):
            if not value:
                return type(value)
            return type(value), tuple((self.mark(key), self.mark(part)) for key, part in value.items())
        if isinstance(value, (list, tuple)):
            return type(value), tuple(self.mark(part) for part in value)
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(value)
        if isinstance(value, nn.Module):
            return _Same(value), self.module(value)
        if isinstance(value, np.ndarray):
            return str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).digest()
        inner = getattr(value, "__dict__", None)
        if inner is None or isinstance(value, _FUNCTIONS) or type(value).__module__.split(".")[0] == "torch":
            return _Same(value)
        return _Same(value), tuple((key, self.mark(part)) for key, part in inner.items())
