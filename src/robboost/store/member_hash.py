"""Hashes of members and data: equal only where the function, or the images and labels, are."""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from robboost.errors import InputError

__all__ = ["hash_data", "hash_member"]

# What every module carries; everything else on a module is its author's and part of its identity.
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
# Checks the inputs of an exported program, and computes nothing.
_GUARDS = ("torch.export._unlift", "GuardsFn")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_PLAIN = (str, int, float, complex, bool, bytes, type(None), torch.dtype, torch.Size, torch.device, torch.layout, slice,
          range, type(Ellipsis))  # fmt: skip
# Part of every class, and nothing of what it computes.
_CLASS_INTERNALS = frozenset(vars(type("_", (), {}))) | {
    "__annotations__", "__annotate_func__", "__annotations_cache__", "__static_attributes__", "__firstlineno__",
    "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__", "__constants__", "__slots__",
    "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__hash__", "__classcell__",
}  # fmt: skip


def hash_member(member: nn.Module) -> str:
    """SHA-256 over parameters, buffers, structure, attributes, hooks and the code of a module's class.

    Two members with the same hash compute the same function up to what their code reaches outside themselves (globals,
    files): such members are not told apart. An attribute whose content cannot be seen is refused.
    """
    return _hash(member, {})


def _hash(member: nn.Module, known: dict[int, str]) -> str:
    """`known` names modules by id: an attribute that refers to one of them adds its name, not its content again."""
    digest = hashlib.sha256()
    known = known | {id(module): f"{len(known)} {name}" for name, module in member.named_modules()}
    for name, module in member.named_modules():
        kind = type(module)
        if (kind.__module__, kind.__qualname__) == _GUARDS:
            continue
        _feed(digest, ("module", name, kind.__module__, kind.__qualname__, module.extra_repr()))
        view = _View(f"{name or 'the member itself'}, a {kind.__qualname__}", known)
        if isinstance(module, fx.GraphModule):
            # Its class is made anew for every graph; the graph says it all but for constants.
            _feed(digest, ("graph", module.graph.python_code("self").src))
            kept = {k: v for k, v in vars(module).items() if isinstance(v, (Tensor, *_PLAIN)) and k != "_code"}
        else:
            kept = vars(module)
            _feed(digest, ("class", view.code_of(kind)))
        for key, value in sorted(kept.items()):
            if key not in _MODULE_INTERNALS:
                _feed(digest, ("attribute", key, view.of(value, key)))
        for key in _HOOKS:
            if hooks := list(vars(module)[key].values()):
                _feed(digest, ("hooks", key, view.of(hooks, key)))
    for name, tensor in sorted([*member.named_parameters(), *member.named_buffers()], key=lambda item: item[0]):
        _feed_tensor(digest, name, tensor)
    return digest.hexdigest()


def hash_data(x: Tensor, y: Tensor) -> str:
    """SHA-256 over images and labels, with their types and shapes."""
    digest = hashlib.sha256()
    _feed_tensor(digest, "x", x)
    _feed_tensor(digest, "y", y.to(torch.int64))
    return digest.hexdigest()


class _View:
    """Forms of values that do not depend on where they lie in memory, nor on what is shared between them.

    A value inside itself is named by its depth.
    """

    def __init__(self, where: str, known: dict[int, str]) -> None:
        self.where = where
        self.known = known
        self.open: list[int] = []
        # With the object: an id stands for it only as long as it lives.
        self.done: dict[int, tuple[object, object]] = {}

    def of(self, value: Any, name: str) -> object:
        if isinstance(value, _PLAIN):
            return value
        if id(value) in self.open:
            return ("again", self.open.index(id(value)))
        if id(value) in self.done:
            return self.done[id(value)][1]
        self.open.append(id(value))
        found = self._container(value, name)
        found = self._callable(value, name) if found is None else found
        found = self._object(value, name) if found is None else found
        self.open.pop()
        short = ("digest", hashlib.sha256(repr(found).encode()).hexdigest())
        self.done[id(value)] = (value, short)
        return short

    def code_of(self, kind: type) -> object:
        """Functions and attributes of a class and its bases; of classes of torch and of this package less.

        Those change with a version, which the manifest holds.
        """
        if kind.__module__.split(".")[0] in ("torch", "builtins", "abc", "typing"):
            return (kind.__module__, kind.__qualname__)
        own = kind.__module__.split(".")[0] == "robboost"
        found = []
        for base in kind.__mro__:
            if base.__module__.split(".")[0] in ("torch", "builtins", "abc", "typing"):
                continue
            names = ["forward"] if own else sorted(set(vars(base)) - _CLASS_INTERNALS)
            found += [(n, self.of(vars(base)[n], f"class attribute {n}")) for n in names if n in vars(base)]
        return (kind.__module__, kind.__qualname__, found)

    def _container(self, value: Any, name: str) -> object:
        if isinstance(value, Tensor):
            return hash_data(value, torch.zeros(0))
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
            array = np.ascontiguousarray(value)
            return ("array", array.dtype.str, np.shape(value), hashlib.sha256(array.tobytes()).hexdigest())
        if isinstance(value, enum.Enum):
            return (type(value).__qualname__, value.name, self.of(value.value, name))
        if isinstance(value, CodeType):
            return self._code(value, name)
        # Subclasses may hold more than their items; they are taken for objects below.
        if type(value) in (tuple, list):
            return [self.of(v, name) for v in value]
        if type(value) in (set, frozenset):
            return sorted(repr(self.of(v, name)) for v in value)
        if isinstance(value, dict):
            return (type(value).__qualname__, [(self.of(k, name), self.of(v, name)) for k, v in value.items()])
        return None

    def _callable(self, value: Any, name: str) -> object:
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
            inside = [self.of(v, name) for v in (value.__defaults__, value.__kwdefaults__, cells)]
            return ("function", value.__qualname__, self._code(value.__code__, name), inside)
        if isinstance(value, MethodType):
            return ("method", self.of(value.__func__, name), self.of(value.__self__, name))
        if isinstance(value, (staticmethod, classmethod)):
            return (type(value).__name__, self.of(value.__func__, name))
        if isinstance(value, functools.cached_property):
            return ("cached", self.of(value.func, name))
        if isinstance(value, property):
            return ("property", [self.of(f, name) for f in (value.fget, value.fset, value.fdel)])
        if isinstance(value, functools.partial):
            return ("partial", [self.of(v, name) for v in (value.func, value.args, value.keywords)])
        if isinstance(value, (ModuleType, logging.Logger)):
            return (type(value).__name__, getattr(value, "__name__", "") or value.name)
        if isinstance(value, type):
            return self.code_of(value)
        if isinstance(value, BuiltinFunctionType) or type(value).__module__ in ("builtins", "torch._ops"):
            named = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
            return None if named is None else ("builtin", getattr(value, "__module__", None), str(named))
        return None

    def _object(self, value: Any, name: str) -> object:
        if isinstance(value, nn.Module):
            return self.known[id(value)] if id(value) in self.known else _hash(value, self.known)
        slots = [s for base in type(value).__mro__ for s in _listed(vars(base).get("__slots__", ()))]
        state = {s: getattr(value, s) for s in slots if s not in ("__dict__", "__weakref__") and hasattr(value, s)}
        state |= getattr(value, "__dict__", {})
        items = list(value) if isinstance(value, (tuple, list, set, frozenset)) else []
        if not state and not items and not hasattr(value, "__dict__"):
            text = repr(value)
            if " at 0x" in text:
                raise InputError(
                    f"{self.where}: attribute {name!r} holds a {type(value).__module__}.{type(value).__qualname__} that"
                    " cannot be told from another; expected numbers, text, tensors, functions or objects made of them,"
                    " so make it one of these, or delete it"
                )
            return (type(value).__qualname__, text)
        kind = self.code_of(type(value))
        return (kind, [self.of(v, name) for v in items], [(k, self.of(v, name)) for k, v in sorted(state.items())])

    def _code(self, code: CodeType, name: str) -> object:
        # A set literal is a frozenset among the constants, and a lambda is code.
        return (code.co_code.hex(), code.co_names, [self.of(c, name) for c in code.co_consts])


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _feed(digest: Any, value: object) -> None:
    text = repr(value).encode()
    digest.update(len(text).to_bytes(8, "little") + text)


def _feed_tensor(digest: Any, name: str, tensor: Tensor) -> None:
    flat = tensor.detach().cpu().contiguous()
    _feed(digest, (name, str(flat.dtype), tuple(flat.shape)))
    # Byte view also for types that NumPy does not know (bfloat16).
    digest.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
