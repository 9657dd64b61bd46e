"""Networks and ensembles in files: safetensors with a description, and what other tools write; no pickle by default."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from robboost.errors import CheckpointError, InputError, RobBoostError, UnsupportedOperationError
from robboost.models.description import describe, network_from
from robboost.models.ensemble import Ensemble
from robboost.models.files import existing_file, parse_json, safetensors_metadata, write_atomically
from robboost.models.layouts import network_for
from robboost.models.onnx_import import load_onnx
from robboost.models.rebuilding import rebuilt
from robboost.models.state_dicts import State, check_finite, read_state_dicts, widened

__all__ = [
    "SUFFIXES",
    "Checkpoint",
    "ModelMetadata",
    "check_forward",
    "load_checkpoints",
    "load_model",
    "load_models",
    "read_metadata",
    "save_model",
]

SUFFIXES = (".safetensors", ".pt", ".pth", ".onnx", ".pt2")
_FORMAT = 1
_KEY = "robboost"  # of the JSON text in a safetensors file's metadata
_MAX_ACTIVATION = 2**28  # numbers that one layer may give for one example
_STORED = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class ModelMetadata:
    """What a file says of its network besides the parameters.

    `layers` holds one description for a network, one for each member of an ensemble. `notes` is what the writer gave:
    architecture, training settings, seed, figures, an ensemble's certificate; it is never interpreted.
    """

    kind: str
    input_shape: tuple[int, ...]
    num_classes: int
    layers: tuple[Mapping[str, Any], ...] = field(repr=False)
    names: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A network out of a file; `input_shape` and `num_classes` are None where nobody says them."""

    model: nn.Module
    input_shape: tuple[int, ...] | None = None
    num_classes: int | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


def load_model(
    path: str | Path,
    *,
    architecture: str | None = None,
    input_shape: Sequence[int] | None = None,
    num_classes: int | None = None,
    allow_pickle: bool = False,
) -> nn.Module:
    """The network or ensemble of a file, in eval mode on the CPU.

    - `.safetensors` written by `save_model`: describes itself. Others: as `.pt`.
    - `.pt`, `.pth`: a state dict, alone or under "state_dict", of a Sequential of convolutions and fully connected
      layers, or of the `architecture` named (a key of ARCHITECTURES or a structure text) for images of `input_shape`.
    - `.onnx`: any network whose operations have bound rules (needs the extra "onnx").
    - `.pt2`: a program of torch.export. PyTorch unpickles parts of such files, which can run any code that is hidden
      in them: they are refused unless `allow_pickle=True` says that the file's author is trusted.

    Half-precision parameters become float32 numbers of exactly the stored values.
    Raises CheckpointError for anything wrong with the file, and UnsupportedOperationError for an ONNX operation that
    has no rule.
    """
    models = load_models(
        path, architecture=architecture, input_shape=input_shape, num_classes=num_classes, allow_pickle=allow_pickle
    )
    if len(models) != 1:
        raise CheckpointError(f"{path}: holds {len(models)} networks, expected one: use load_models for such a list")
    return models[0]


def load_models(
    path: str | Path,
    *,
    architecture: str | None = None,
    input_shape: Sequence[int] | None = None,
    num_classes: int | None = None,
    allow_pickle: bool = False,
) -> list[nn.Module]:
    """All networks of a file: as `load_model`, and for checkpoints whose "state_dict" is a list of several."""
    found = load_checkpoints(
        path, architecture=architecture, input_shape=input_shape, num_classes=num_classes, allow_pickle=allow_pickle
    )
    return [checkpoint.model for checkpoint in found]


def load_checkpoints(
    path: str | Path,
    *,
    architecture: str | None = None,
    input_shape: Sequence[int] | None = None,
    num_classes: int | None = None,
    allow_pickle: bool = False,
) -> list[Checkpoint]:
    """As `load_models`, each network with the shape of its images and the notes that its file holds."""
    file = existing_file(path)
    suffix = file.suffix.lower()
    given = None if input_shape is None else tuple(int(side) for side in input_shape)
    if suffix == ".pt2":
        return [Checkpoint(_load_exported(file, allow_pickle), given, num_classes)]
    if suffix == ".onnx":
        return [Checkpoint(*load_onnx(file, input_shape=given))]
    if suffix == ".safetensors":
        metadata = safetensors_metadata(file)
        if _KEY in metadata:
            described = _parse_metadata(metadata[_KEY], file)
            model = _load_described(file, described)
            return [Checkpoint(model, described.input_shape, described.num_classes, described.notes)]
        states = [_read_tensors(file)]
    elif suffix in (".pt", ".pth"):
        states = read_state_dicts(file)
    else:
        raise CheckpointError(f"{file}: unknown kind of file, expected one of {', '.join(SUFFIXES)}")
    found = []
    for state in states:
        try:
            network, renamed, shape = network_for(
                state, architecture=architecture, input_shape=given, num_classes=num_classes
            )
            classes = check_forward(network, shape)
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error}") from None
        found.append(Checkpoint(_filled(network, renamed, file), shape, classes))
    return found


def save_model(
    model: nn.Module,
    path: str | Path,
    notes: Mapping[str, Any] | None = None,
    *,
    input_shape: Sequence[int],
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a network or an `Ensemble` (members, weights, scales) to one .safetensors file that describes itself.

    Networks of standard layers come back as they are. Any other network that has bounds (a module with a forward of its
    own, an exported program) is saved by the operations of its trace and comes back as a `WiredNetwork`, which computes
    the same up to rounding.

    `notes` are JSON values kept beside it: architecture, training settings, certificate. `dtype` stores parameters in
    another precision: float16 halves the file (certify what `load_model` gives back: the rounded numbers, as float32).
    Buffers (normalisation, running statistics) and an ensemble's weights and scales are stored as they are.
    """
    file = Path(path)
    if file.suffix != ".safetensors" or (dtype is not None and dtype not in _STORED):
        raise InputError(f"path={str(path)!r}, dtype={dtype}: expected a .safetensors file and float16, 32, 64 or None")
    shape = tuple(int(side) for side in input_shape)
    given = list(model.members) if isinstance(model, Ensemble) else [model]
    members, layers = zip(*(_describable(member, shape) for member in given), strict=True)
    classes = {check_forward(network_from(description), shape) for description in layers}
    if len(classes) != 1:
        raise InputError(f"members give {sorted(classes)} classes, expected the same number from each")
    tensors: State = {}
    for prefix, member in zip(_prefixes(members, model), members, strict=True):
        parameters = {name for name, _ in member.named_parameters(remove_duplicate=False)}
        for name, value in member.state_dict().items():
            stored = _stored(value, dtype if name in parameters else None)
            if not bool(stored.isfinite().all()):
                raise InputError(f"{prefix}{name} is not finite as {stored.dtype}: expected finite parameters")
            tensors[prefix + name] = stored
    if isinstance(model, Ensemble):
        tensors |= {"weights": _stored(model.weights, None), "scales": _stored(model.scales, None)}
    described = {
        "format": _FORMAT,
        "kind": "ensemble" if isinstance(model, Ensemble) else "model",
        "input_shape": shape,
        "num_classes": classes.pop(),
        "layers": list(layers),
        "names": list(model.names) if isinstance(model, Ensemble) else [],
        "notes": dict(notes or {}),
    }
    try:
        text = json.dumps(described, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"notes cannot be written as JSON ({error}): expected texts, finite numbers, lists, tables"
        ) from None
    write_atomically(file, to_safetensors(tensors, metadata={"format": "pt", _KEY: text}))


def read_metadata(path: str | Path) -> ModelMetadata:
    """What a file written by `save_model` says of itself; no tensor is read."""
    file = existing_file(path)
    metadata = safetensors_metadata(file)
    if _KEY not in metadata:
        raise CheckpointError(f"{file}: does not describe itself, expected a file written by save_model")
    return _parse_metadata(metadata[_KEY], file)


def check_forward(network: nn.Module, input_shape: Sequence[int]) -> int:
    """The number of classes that a network on the meta device gives for images of this shape; nothing is computed."""

    def refuse_large(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.numel() > _MAX_ACTIVATION:
            raise CheckpointError(
                f"a layer gives {output.numel()} numbers for one image, at most {_MAX_ACTIVATION} allowed"
            )

    hooks = [module.register_forward_hook(refuse_large) for module in network.modules()]
    dtype = next((value.dtype for value in network.parameters()), torch.float32)
    try:
        logits = network(torch.empty((1, *input_shape), device="meta", dtype=dtype))
    except RobBoostError:
        raise
    except Exception as error:  # whatever layers say of sizes that do not fit
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"network does not take images of shape {list(input_shape)} ({lines[0]}), expected matching layers"
        ) from None
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != 1 or logits.shape[1] < 2:
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise CheckpointError(
            f"network gives {shape} for one image of shape {list(input_shape)}, expected [1, classes]"
        )
    return int(logits.shape[1])


def _describable(member: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, dict[str, Any]]:
    """The network and its layers; one of other types is first wired again from its trace."""
    try:
        return member, describe(member)
    except UnsupportedOperationError:
        pass  # the trace decides, and it names an operation rather than a type
    wired = rebuilt(member, shape)
    return wired, describe(wired)


def _prefixes(members: Sequence[nn.Module], model: nn.Module) -> list[str]:
    return [f"members.{t}." for t in range(len(members))] if isinstance(model, Ensemble) else [""]


def _stored(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    value = value.detach().cpu()
    return (value.to(dtype) if dtype is not None and value.is_floating_point() else value).clone().contiguous()


def _parse_metadata(text: str, file: Path) -> ModelMetadata:
    found = parse_json(text, f"{file}: metadata")
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        version = found.get("format") if isinstance(found, dict) else None
        raise CheckpointError(
            f"{file}: format version {version!r}, expected {_FORMAT}: update robboost to read newer files"
        )
    shape, classes, layers = found.get("input_shape"), found.get("num_classes"), found.get("layers")
    names, notes, kind = found.get("names"), found.get("notes"), found.get("kind")
    if not isinstance(shape, list) or not 1 <= len(shape) <= 4:
        raise CheckpointError(f"{file}: input_shape={shape!r}, expected the sides of an image")
    if (
        any(type(side) is not int or not 1 <= side <= 2**20 for side in shape)
        or type(classes) is not int
        or classes < 2
    ):
        raise CheckpointError(f"{file}: input_shape={shape!r}, num_classes={classes!r}: expected positive numbers")
    if not isinstance(layers, list) or not layers or not all(isinstance(entry, dict) for entry in layers):
        raise CheckpointError(f"{file}: no layers described, expected a file written by save_model")
    if kind not in ("model", "ensemble") or (kind == "model" and len(layers) != 1):
        raise CheckpointError(f"{file}: kind={kind!r} with {len(layers)} networks, expected 'model' or 'ensemble'")
    if not isinstance(notes, dict) or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{file}: names and notes are damaged, expected a file written by save_model")
    if kind == "ensemble" and len(names) != len(layers):
        raise CheckpointError(f"{file}: {len(names)} names for {len(layers)} members, expected one each")
    return ModelMetadata(kind, tuple(shape), classes, tuple(layers), tuple(names), notes)


def _read_tensors(file: Path) -> State:
    try:
        stored = load_file(file)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file}: damaged ({error}), expected an intact .safetensors file") from None
    check_finite(stored, file)
    # Copies: the library maps the file into memory, and a network must not change when its file does.
    return {name: widened(value).clone(memory_format=torch.contiguous_format) for name, value in stored.items()}


def _load_described(file: Path, metadata: ModelMetadata) -> nn.Module:
    tensors = _read_tensors(file)
    networks = []
    for t, description in enumerate(metadata.layers):
        prefix = f"members.{t}." if metadata.kind == "ensemble" else ""
        network = network_from(description)
        if (classes := check_forward(network, metadata.input_shape)) != metadata.num_classes:
            raise CheckpointError(f"{file}: a network of {classes} classes, expected {metadata.num_classes}")
        state = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)} if prefix else tensors
        networks.append(_filled(network, {name.removeprefix(prefix): value for name, value in state.items()}, file))
    if metadata.kind == "model":
        return networks[0]
    weights, scales = tensors.pop("weights", None), tensors.pop("scales", None)
    if weights is None or scales is None or tensors:
        raise CheckpointError(f"{file}: weights or scales missing, or unknown tensors {list(tensors)[:3]}")
    try:
        ensemble = Ensemble(networks, weights, scales, names=metadata.names)
    except InputError as error:
        raise CheckpointError(f"{file}: {error}") from None
    # The constructor normalises again, which may move a last bit; the certificate was stated for the stored numbers.
    ensemble.weights.copy_(weights)
    return ensemble


def _filled(network: nn.Module, state: State, file: Path) -> nn.Module:
    """The meta network with these tensors in place, after comparing every name and shape."""
    wanted = network.state_dict()
    for name in [*wanted, *state]:
        shape = list(wanted[name].shape) if name in wanted else "no such tensor"
        given = list(state[name].shape) if name in state else "none"
        if shape != given:
            raise CheckpointError(f"{file}: tensor {name} is {given} in the file, expected {shape}")
        if wanted[name].is_floating_point() != state[name].is_floating_point():
            raise CheckpointError(f"{file}: tensor {name} is {state[name].dtype}, expected {wanted[name].dtype}")
    network.load_state_dict(state, assign=True)
    for name, module in network.named_modules():
        std = getattr(module, "std", None) if type(module).__name__ == "Normalize" else None
        if isinstance(std, Tensor) and not bool((std > 0).all()):
            raise CheckpointError(f"{file}: {name}.std holds numbers that are not above zero")
    return network.eval()


def _load_exported(file: Path, allow_pickle: bool) -> nn.Module:
    if not allow_pickle:
        raise CheckpointError(
            f"{file}: PyTorch unpickles parts of .pt2 files, which can run code hidden in them; expected .safetensors,"
            " .onnx or a state dict (or allow_pickle=True if you trust the author)"
        )
    try:
        return torch.export.load(file).module()
    except Exception as error:  # torch.export documents none
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{file}: cannot be loaded ({lines[0][:200]}), expected what torch.export.save writes"
        ) from None
