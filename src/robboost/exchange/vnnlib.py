"""VNN-LIB: one property file for each image and threat, for verifiers of the competition; and reading them back."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from robboost.errors import DataError, InputError, RobBoostError
from robboost.models.files import existing_file, write_atomically
from robboost.threat import Threat

__all__ = ["Property", "read_property", "write_properties"]

_MAX_BYTES = 2**28
_MAX_VARIABLES = 10_000_000
_TOKEN = re.compile(r"[()]|[^\s()]+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Property:
    """An image's threat set as an interval for each input, and the classes of which none may reach the label's logit.

    The file is satisfiable when some point of lower <= X <= upper [d] has Y_j >= Y_label for some j in `targets`; a
    verifier that answers "unsat" has proved the image.
    """

    lower: Tensor
    upper: Tensor
    label: int
    targets: tuple[int, ...]
    num_classes: int


def write_properties(
    folder: str | Path,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    num_classes: int,
    network: str = "network.onnx",
    timeout_s: int = 300,
) -> list[Path]:
    """One .vnnlib file for each image [N, *input] under `folder`/properties, and `folder`/instances.csv for all.

    instances.csv has a line "network,property,seconds" for each, as the competition's tools take it; `network` is the
    file that `export_onnx` wrote, by its path from `folder`. Intervals hold the box of pixels where the threat has one,
    and are rounded outward (to the next float64), so that a proof of the file proves the image. Inputs X_0, X_1, ...
    number the image's values row by row, channel first. Only for l_inf: VNN-LIB has linear constraints.
    """
    if threat.norm != "linf":
        raise InputError(f"norm={threat.norm!r}, expected 'linf': VNN-LIB cannot state other balls")
    if x.dim() < 2 or len(x) != len(y) or not len(x) or not bool(x.isfinite().all()):
        raise InputError(f"{len(x)} images of shape {list(x.shape[1:])} and {len(y)} labels, expected one for each")
    if num_classes < 2 or not bool(((y >= 0) & (y < num_classes)).all()):
        raise InputError(
            f"num_classes={num_classes}, labels {int(y.min())} to {int(y.max())}, expected labels below it"
        )
    if timeout_s < 1 or any(character in network for character in ',"\n\r'):
        raise InputError(
            f"timeout_s={timeout_s}, network={network!r}, expected a whole second or more, and a plain name"
        )
    root = Path(folder)
    try:
        (root / "properties").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{root}: cannot be created ({error.strerror}), expected a folder name") from None
    lower, upper = _ends(x.double().cpu(), threat)
    written, lines = [], []
    for n, label in enumerate(y.tolist()):
        file = root / "properties" / f"image_{n:05d}.vnnlib"
        title = f"; image {n} of class {label}, {threat}"
        write_atomically(file, _text(title, lower[n].flatten(), upper[n].flatten(), label, num_classes).encode())
        written.append(file)
        lines.append(f"{network},properties/{file.name},{timeout_s}\n")
    write_atomically(root / "instances.csv", "".join(lines).encode())
    return written


def read_property(path: str | Path) -> Property:
    """The property of a file that `write_properties` wrote, or of another in the same form; DataError for others.

    The form: X_i and Y_j declared as Real, X_i bounded from both sides by numbers, and Y_j >= Y_label asserted for one
    j, or for one or another of several ("or", each alternative bare or inside an "and" of its own).
    """
    try:
        file = existing_file(path, max_bytes=_MAX_BYTES)
    except RobBoostError as error:
        raise DataError(str(error)) from None
    try:
        return _parse(file.read_text(encoding="ascii"))
    except (ValueError, RecursionError, IndexError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise DataError(f"{file}: no robustness property ({lines[0][:200]}), expected the form of VNN-LIB 1") from None


def _ends(x: Tensor, threat: Threat) -> tuple[Tensor, Tensor]:
    """Ends of the intervals, rounded outward; the box is exact, for it limits what an image can be."""
    low, high = threat.clip if threat.clip is not None else (-math.inf, math.inf)
    lower = torch.nextafter(x - threat.eps, torch.tensor(-math.inf, dtype=torch.float64)).clamp(min=low)
    upper = torch.nextafter(x + threat.eps, torch.tensor(math.inf, dtype=torch.float64)).clamp(max=high)
    if not bool((lower <= upper).all()):
        raise InputError(f"an image lies further than eps outside the box of {threat}, expected images inside it")
    return lower, upper


def _text(title: str, lower: Tensor, upper: Tensor, label: int, num_classes: int) -> str:
    lines = [title, ""]
    lines += [f"(declare-const X_{i} Real)" for i in range(len(lower))]
    lines += [f"(declare-const Y_{j} Real)" for j in range(num_classes)]
    lines += ["", "; the threat set"]
    for i, (low, high) in enumerate(zip(lower.tolist(), upper.tolist(), strict=True)):
        lines += [f"(assert (>= X_{i} {_decimal(low)}))", f"(assert (<= X_{i} {_decimal(high)}))"]
    lines += ["", "; some other class reaches the true one", "(assert (or"]
    lines += [f"    (and (>= Y_{j} Y_{label}))" for j in range(num_classes) if j != label]
    return "\n".join([*lines, "))", ""])


def _decimal(value: float) -> str:
    """The shortest decimal that is read back as this float64, never in scientific notation: not all parsers know it."""
    return np.format_float_positional(value, unique=True, trim="0")


def _parse(text: str) -> Property:
    lower: dict[int, float] = {}
    upper: dict[int, float] = {}
    declared: dict[str, int] = {"X": 0, "Y": 0}
    violations: list[tuple[int, int]] | None = None
    for statement in _statements(text):
        if statement[0] == "declare-const":
            letter, number = _variable(statement[1])
            if statement[2:] != ["Real"] or number != declared[letter] or number >= _MAX_VARIABLES:
                raise ValueError(f"declaration {statement}")
            declared[letter] += 1
        elif statement[0] == "assert" and len(statement) == 2 and isinstance(statement[1], list):
            formula = statement[1]
            if formula[0] in ("<=", ">=") and isinstance(formula[1], str) and formula[1].startswith("X_"):
                _bound(formula, lower, upper)
            elif violations is None:
                violations = _violations(formula)
            else:
                raise ValueError("more than one statement on the outputs")
        else:
            raise ValueError(f"statement {str(statement)[:80]}")
    if violations is None or set(lower) != set(range(declared["X"])) or set(upper) != set(lower) or not lower:
        raise ValueError("inputs without bounds, or no statement on the outputs")
    labels = {label for _, label in violations}
    targets = tuple(sorted(target for target, _ in violations))
    if len(labels) != 1 or len(set(targets)) != len(targets) or labels & set(targets):
        raise ValueError("outputs are not compared with one label")
    if max(*targets, *labels) >= declared["Y"]:
        raise ValueError("an output that is not declared")
    ends = [torch.tensor([values[i] for i in range(len(values))], dtype=torch.float64) for values in (lower, upper)]
    if not bool((ends[0] <= ends[1]).all()):
        raise ValueError("a lower bound above its upper one")
    return Property(ends[0], ends[1], labels.pop(), targets, declared["Y"])


def _statements(text: str) -> Iterator[list]:
    """Top-level lists of the file; nested ones as lists, names and numbers as texts."""
    stack: list[list] = []
    for line in text.splitlines():
        for token in _TOKEN.findall(line.split(";", 1)[0]):
            if token == "(":
                stack.append([])
                if len(stack) > 10:
                    raise ValueError("nested too deep")
                continue
            if not stack:
                raise ValueError(f"{token[:20]!r} outside a statement")
            if token != ")":
                stack[-1].append(token)
                continue
            done = stack.pop()
            if not done:
                raise ValueError("an empty list")
            if stack:
                stack[-1].append(done)
            else:
                yield done
    if stack:
        raise ValueError("a statement that does not end")


def _variable(name: object) -> tuple[str, int]:
    match = re.fullmatch(r"([XY])_(\d{1,8})", name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f"{str(name)[:40]!r} is no variable X_i or Y_j")
    return match[1], int(match[2])


def _bound(formula: list, lower: dict[int, float], upper: dict[int, float]) -> None:
    relation, name, value = formula
    _, number = _variable(name)
    if not isinstance(value, str) or _NUMBER.fullmatch(value) is None or not math.isfinite(float(value)):
        raise ValueError(f"bound {str(value)[:40]!r} of {name}")
    side = lower if relation == ">=" else upper
    if number in side:
        raise ValueError(f"{name} is bounded twice from one side")
    side[number] = float(value)


def _violations(formula: list) -> list[tuple[int, int]]:
    """(target, label) of each alternative Y_target >= Y_label."""
    alternatives = formula[1:] if formula[0] == "or" else [formula]
    found = []
    for alternative in alternatives:
        inner = alternative[1] if len(alternative) == 2 and alternative[0] == "and" else alternative
        if not isinstance(inner, list) or len(inner) != 3 or inner[0] not in ("<=", ">="):
            raise ValueError(f"alternative {str(alternative)[:80]}")
        (first, left), (second, right) = _variable(inner[1]), _variable(inner[2])
        if (first, second) != ("Y", "Y"):
            raise ValueError(f"alternative {str(alternative)[:80]}")
        found.append((left, right) if inner[0] == ">=" else (right, left))
    return found
