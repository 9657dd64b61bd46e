"""A trained network as a short list of operations, with its parameters looked up live.

`trace` runs `torch.export` once per module and input shape, and keeps for each operation its kind, its inputs, its
shape without the batch axis and the constants that it needs. What depends on parameters alone (a transposed weight, the
weights of an ensemble divided by their scales) stays a small program that is run again at every call: gradients reach
the parameters, and new weights need no new trace.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from robboost.errors import InputError, UnsupportedOperationError
from robboost.models.fingerprint import fingerprint
from robboost.models.operations import RULES, Context, Operation, Slot, Step, name_of, place_of

__all__ = ["Graph", "Operation", "Slot", "trace"]


@dataclass(frozen=True)
class _Leaf:
    source: str
    value: Any


@dataclass(frozen=True)
class Graph:
    """The operations of a network in topological order; the last one gives the logits [N, classes].

    `batched` is False where the module admits only a batch of one (the operations hold for each example all the same).
    """

    operations: tuple[Operation, ...]
    batched: bool
    _program: tuple[_Leaf | Step, ...] = field(repr=False)

    @property
    def classes(self) -> int:
        return self.operations[-1].shape[0]

    def constants(self, model: nn.Module, dtype: torch.dtype) -> list[Any]:
        """Values of all slots for the parameters that `model` holds now, floating point ones as `dtype`."""
        values: list[Any] = []

        def resolve(argument: Any) -> Any:
            if isinstance(argument, Slot):
                return values[argument.index]
            if isinstance(argument, (list, tuple)):
                return type(argument)(resolve(part) for part in argument)
            return argument

        for entry in self._program:
            if isinstance(entry, _Leaf):
                value = entry.value
                if entry.source == "parameter":
                    value = model.get_parameter(value)
                elif entry.source == "buffer":
                    value = model.get_buffer(value)
            else:
                keywords = {key: resolve(part) for key, part in entry.keywords.items()}
                value = entry.function(*resolve(entry.arguments), **keywords)
            if isinstance(value, Tensor) and value.is_floating_point():
                value = value.to(dtype).clone() if value.is_inference() else value.to(dtype)
            values.append(value)
        return values


# Weak: a trace lives as long as its module. The value holds the structure that was traced beside the graphs per shape.
_CACHE: weakref.WeakKeyDictionary[nn.Module, tuple[Any, dict[Any, Graph]]] = weakref.WeakKeyDictionary()


def trace(model: nn.Module, shape: tuple[int, ...], *, fresh: bool = False) -> Graph:
    """Operations of `model` for one example of `shape` (no batch axis); `fresh` forgets an earlier trace.

    Raises UnsupportedOperationError for an operation without a rule, naming it and its place, and for a module that
    answers differently when asked twice; InputError for a module in training mode or one that cannot be traced.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
    _refuse_training(model)
    structure = fingerprint(model)
    known = _CACHE.get(model)
    if known is None or known[0] != structure or fresh:
        known = (structure, {})
        _CACHE[model] = known
    if shape not in known[1]:
        known[1][shape] = _build(model, shape)
        _refuse_fickle(model, shape)
    return known[1][shape]


def _refuse_training(model: nn.Module) -> None:
    exported: list[str] = []
    for name, part in model.named_modules():
        # An exported program's module cannot leave training mode: its operators themselves say whether they train.
        if isinstance(part, torch.fx.GraphModule):
            exported.append(f"{name}." if name else "")
        elif part.training and not any(name.startswith(prefix) for prefix in exported):
            what = f"module {name} ({type(part).__name__})" if name else "model"
            raise InputError(f"{what} is in training mode, bounds need a fixed function: call model.eval() first")


def _refuse_fickle(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Random numbers that PyTorch does not draw are constants to a trace; two answers to one question show them."""
    example = _example(model, (1, *shape)) + 0.5
    with torch.no_grad(), torch.autocast(example.device.type, enabled=False):
        first, second = model(example), model(example)
    # Not finite in both: the parameters are at fault, and are refused as such.
    apart = (first - second).abs() > 1e-2 * first.abs().max()
    if bool(apart.any()):
        raise UnsupportedOperationError(
            f"{type(model).__name__} gives two answers for one input: it is random or keeps a state, bounds need a"
            " fixed function"
        )


def _example(model: nn.Module, size: tuple[int, ...]) -> Tensor:
    """Zeros as the module takes them."""
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    device = like.device if like is not None else torch.device("cpu")
    dtype = like.dtype if like is not None else torch.get_default_dtype()
    return torch.zeros(size, device=device, dtype=dtype)


def _export(model: nn.Module, shape: tuple[int, ...]) -> tuple[torch.export.ExportedProgram, bool]:
    failures: list[str] = []
    # The batch axis is left open where the module allows it, so that no rule can depend on its size by accident.
    for batch, dynamic in ((2, ({0: torch.export.Dim.AUTO},)), (1, None)):
        example = _example(model, (batch, *shape))
        try:
            with torch.no_grad(), torch.autocast(example.device.type, enabled=False):
                program = torch.export.export(model, (example,), strict=False, dynamic_shapes=dynamic)
        except Exception as error:  # whatever the module's own forward raises ends here, and is named below
            lines = str(error).strip().splitlines()
            failures.append(lines[0] if lines else type(error).__name__)
            continue
        if any(name_of(node).endswith("_") for node in program.graph.nodes if node.op == "call_function"):
            program = program.run_decompositions({})  # in-place operators would change values under other names
        size = _user_input(program).meta["val"].shape[0]
        if dynamic is None or not isinstance(size, int):
            return program, dynamic is not None
    if failures:
        raise InputError(f"the network cannot be traced for inputs of shape {list(shape)}: {failures[0]}")
    raise InputError("the network was fixed to a batch size other than one: export it with an open batch axis")


def _user_input(program: torch.export.ExportedProgram) -> torch.fx.Node:
    names = program.graph_signature.user_inputs
    if len(names) != 1:
        raise UnsupportedOperationError(f"the network takes {len(names)} inputs, expected one tensor of images")
    return next(node for node in program.graph.nodes if node.name == names[0])


def _ancestors(output: torch.fx.Node) -> set[torch.fx.Node]:
    found, waiting = {output}, [output]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                waiting.append(node)
    return found


def _frozen(value: Any, slots: dict[torch.fx.Node, Slot]) -> Any:
    if isinstance(value, torch.fx.Node):
        return slots[value]
    if isinstance(value, (list, tuple)):
        return (
            tuple(_frozen(part, slots) for part in value)
            if isinstance(value, tuple)
            else [_frozen(part, slots) for part in value]
        )
    return value


def _leaf(node: torch.fx.Node, program: torch.export.ExportedProgram) -> _Leaf:
    signature, name = program.graph_signature, node.name
    if name in signature.inputs_to_parameters:
        return _Leaf("parameter", signature.inputs_to_parameters[name])
    if name in signature.inputs_to_buffers:
        return _Leaf("buffer", signature.inputs_to_buffers[name])
    return _Leaf("tensor", program.constants[signature.inputs_to_lifted_tensor_constants[name]])


def _build(model: nn.Module, shape: tuple[int, ...]) -> Graph:
    program, batched = _export(model, shape)
    outputs = next(node for node in program.graph.nodes if node.op == "output").args[0]
    if len(program.graph_signature.user_outputs) != 1 or len(outputs) != 1:
        raise UnsupportedOperationError(
            f"the network returns or changes {len(outputs)} values, expected one tensor of logits"
        )
    entry, output = _user_input(program), outputs[0]
    positions: dict[torch.fx.Node, int] = {}
    slots: dict[torch.fx.Node, Slot] = {}
    steps: list[Any] = []
    operations: list[Operation] = []
    context = Context(positions, slots, operations, steps)
    needed = _ancestors(output)
    for node in program.graph.nodes:
        context.node = node
        if node is entry:
            context.batch = node.meta["val"].shape[0]
            positions[node] = context.emit("input", (), tuple(shape))
        elif node not in needed or node.op == "output":
            continue
        elif node.op == "placeholder":
            slots[node] = Slot(len(steps))
            steps.append(_leaf(node, program))
        elif node.op != "call_function":
            raise context.refuse("it is no plain operator")
        elif not any(source in positions for source in node.all_input_nodes):
            _constant_step(node, slots, steps)
        elif name_of(node) != "aten.sym_size":  # sizes of the batch: a reshape does without them
            rule = RULES.get(name_of(node))
            if rule is None:
                raise UnsupportedOperationError(f"{name_of(node)} at {place_of(node)} has no bound rule")
            positions[node] = rule(context)
    if output not in positions:
        raise UnsupportedOperationError("the network's output does not depend on its input")
    kept = operations[: positions[output] + 1]
    if len(kept[-1].shape) != 1 or kept[-1].shape[0] < 2:
        raise InputError(f"the network gives values of shape {list(kept[-1].shape)}, expected two or more logits")
    return Graph(tuple(kept), batched, tuple(steps))


def _constant_step(node: torch.fx.Node, slots: dict[torch.fx.Node, Slot], steps: list[Any]) -> None:
    if any(source not in slots for source in node.all_input_nodes):
        return  # arithmetic on the size of the batch: a reshape does without it, any other use is refused
    target: Any = node.target
    tags = getattr(target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        raise UnsupportedOperationError(f"{name_of(node)} at {place_of(node)} is random, bounds need a fixed function")
    keywords = {key: _frozen(value, slots) for key, value in node.kwargs.items()}
    slots[node] = Slot(len(steps))
    steps.append(Step(target, tuple(_frozen(value, slots) for value in node.args), keywords))
