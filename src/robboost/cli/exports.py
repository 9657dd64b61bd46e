"""export: an ensemble or a network for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from robboost.cli.console import check_writable, show
from robboost.cli.options import (
    ArchitectureOption,
    ClipOption,
    DataOption,
    EpsOption,
    JsonOption,
    ModelArgument,
    NormOption,
    ShapeOption,
    open_data,
    open_model,
    open_threat,
)
from robboost.errors import InputError
from robboost.exchange import export_onnx, write_properties
from robboost.inputs import check_examples

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(export)


def export(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", help="The .onnx file.")],
    vnnlib: Annotated[
        int,
        typer.Option("--vnnlib", help="Also write properties of so many test images, and instances.csv, beside it."),
    ] = 0,
    data: DataOption = None,
    split: Annotated[str, typer.Option("--split", help="train, heldout or test.")] = "test",
    eps: EpsOption = None,
    norm: NormOption = None,
    clip: ClipOption = "0,1",
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Fix the batch axis (some tools want 1).")
    ] = None,
    architecture: ArchitectureOption = None,
    input_shape: ShapeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write ONNX (checked with onnxruntime to 1e-5), and VNN-LIB properties for other verifiers."""
    if out.suffix != ".onnx":
        raise InputError(f"--out {out}: expected a name that ends in .onnx")
    if vnnlib < 0:
        raise InputError(f"--vnnlib {vnnlib}: expected a number of images, 0 or more")
    check_writable(out)
    found = open_model(model, architecture, input_shape)
    if found.input_shape is None:
        raise InputError(f"{model}: does not say the shape of its images; expected --input-shape, such as 1,28,28")
    asked = None
    if vnnlib:  # before anything is written
        images = open_data(data, found.notes, split, vnnlib)
        check_examples(found.network, images.images, images.labels)
        asked = images, open_threat(eps, norm, clip, found.notes)
    written = export_onnx(found.network, out, input_shape=found.input_shape, batch_size=batch_size)
    result = {"onnx": str(out), "largest_difference": written.largest_difference, "properties": 0}
    if asked is not None:
        images, threat = asked
        classes = len(images.classes)
        paths = write_properties(
            out.parent, images.images, images.labels, threat, num_classes=classes, network=out.name
        )
        result["properties"] = len(paths)
    text = f"{out}: logits within {written.largest_difference:.1e} of PyTorch's; {result['properties']} properties"
    show(result if as_json else text, as_json)
