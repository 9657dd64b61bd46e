"""fit, certify, attack, compare: from a pool to an ensemble and its figures."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from robboost.attacks import AttackSettings, attack
from robboost.certification import certify
from robboost.cli.console import check_writable, progress, resumed, show, to_json, together, write_text
from robboost.cli.options import (
    ArchitectureOption,
    BoundsOption,
    ClipOption,
    DataOption,
    DeviceOption,
    EpsOption,
    JsonOption,
    LimitOption,
    ModelArgument,
    NormOption,
    PoolArgument,
    ShapeOption,
    ThreadsOption,
    open_data,
    open_model,
    open_pool,
    open_threat,
    set_threads,
)
from robboost.comparison import Settings, compare
from robboost.data import Dataset
from robboost.devices import usable_device
from robboost.distributed import Processes, shared_examples
from robboost.errors import InputError
from robboost.fitting import RobBoost
from robboost.models import Pool, save_model
from robboost.observability import resources
from robboost.report import write_report
from robboost.store import BoundStore
from robboost.stored import StoredBounds, stored_bounds
from robboost.threat import Threat

__all__ = ["register"]

SplitOption = Annotated[str, typer.Option("--split", help="train, heldout or test.")]
StepsOption = Annotated[int, typer.Option("--steps", help="Gradient steps of the attack (0: no attack in compare).")]
RestartsOption = Annotated[int, typer.Option("--restarts", help="Starts of the attack.")]
KappaOption = Annotated[
    str, typer.Option("--kappa", help="Margin that is safe enough; auto: chosen on a validation part.")
]
MembersOption = Annotated[int | None, typer.Option("--max-members", help="At most so many members with weight.")]
MegabytesOption = Annotated[float | None, typer.Option("--max-megabytes", help="At most so many MB of parameters.")]
ChosenBoundsOption = Annotated[
    str | None,
    typer.Option(
        "--bounds", help='ibp, crown, tightest, "ibp+crown", ...  [default: those of a shipped pool, or tightest]'
    ),
]
AutoAttackOption = Annotated[
    str,
    typer.Option(
        "--autoattack", help='Then AutoAttack on what still stands: "standard", or parts such as "apgd-ce+square".'
    ),
]
FitDataOption = Annotated[
    str | None, typer.Option("--fit-data", help="Where held-out images come from, if not from --data.")
]
FitLimitOption = Annotated[int | None, typer.Option("--fit-limit", help="Use so many held-out images.")]

_ON_TRAINING_IMAGES = (
    "robboost: --split train: if the members were trained on these images, the most overfitted of them looks best and"
    " wins weight that it does not deserve; heldout is the default for that reason\n"
)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    for command in (fit, certify_command, attack_command, compare_command, report_command):
        app.command(name=command.__name__.removesuffix("_command"))(command)


def fit(
    pool: PoolArgument,
    out: Annotated[Path, typer.Option("--out", help="Where the ensemble goes.")] = Path("ensemble.safetensors"),
    data: DataOption = None,
    split: SplitOption = "heldout",
    limit: LimitOption = None,
    eps: EpsOption = None,
    norm: NormOption = None,
    clip: ClipOption = "0,1",
    bounds: BoundsOption = "tightest",
    kappa: KappaOption = "auto",
    method: Annotated[str, typer.Option("--method", help="auto (proved optimum), coordinate or uniform.")] = "auto",
    max_members: MembersOption = None,
    max_megabytes: MegabytesOption = None,
    store: Annotated[
        str | None,
        typer.Option("--store", help="Stream the bounds that `robboost bounds` left here (and their method)."),
    ] = None,
    architecture: ArchitectureOption = None,
    input_shape: ShapeOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the weights with the best certificate and save the ensemble as one file."""
    set_threads(threads)
    place = usable_device(device)
    check_writable(out)
    if out.suffix != ".safetensors":
        raise InputError(f"--out {out}: expected a name that ends in .safetensors")
    found = open_pool(pool, architecture, input_shape)
    threat = open_threat(eps, norm, clip, found.notes)
    images = open_data(data, found.notes, split, limit)
    if split == "train":
        sys.stderr.write(_ON_TRAINING_IMAGES)
    with together() as (processes, tell):  # bounds in a store are read by the CPU, or by the GPUs of torchrun
        stored = _stored(store, found, images, threat, processes)
        if stored is None and processes.size > 1:
            raise InputError(f"{processes.size} processes without --store: expected bounds that they can share")
        engine = bounds if stored is None else stored.method
        estimator = RobBoost(threat, kappa=_kappa(kappa), method=method, bounds=engine, max_members=max_members,
                             max_megabytes=max_megabytes)  # fmt: skip
        known = None if stored is None else str(stored.store.identity)
        about = {**estimator.get_params(), "threat": vars(threat), "store": known, "rank": processes.rank}
        with resumed("fit", found.models, [images], **about, processes=processes.size, device=str(place)):
            if stored is None:
                to_device(found, place)
                fitted = estimator.fit(found, images.images, images.labels, progress=tell)
            else:
                fitted = estimator.fit_bounds(found, stored, progress=tell)
    if processes.rank > 0:
        return
    notes = {
        "dataset": images.name,
        "threat": {"eps": threat.eps, "norm": threat.norm, "clip": None if threat.clip is None else list(threat.clip)},
        "fit": fitted.to_dict(),
    }
    save_model(fitted.ensemble.cpu(), out, notes, input_shape=images.input_shape)
    show(fitted, as_json)
    if not as_json:
        typer.echo(f"saved         {out}")


def _stored(
    store: str | None, pool: Pool, images: Dataset, threat: Threat, processes: Processes
) -> StoredBounds | None:
    if store is None:
        return None
    found = stored_bounds(BoundStore.open(store), pool.models, (images.images, images.labels), processes=processes)
    if found.threat != threat:
        raise InputError(f"--store {store} holds bounds for {found.threat}: expected {threat}, so name another store")
    return found


def certify_command(
    model: ModelArgument,
    data: DataOption = None,
    split: SplitOption = "test",
    limit: LimitOption = None,
    eps: EpsOption = None,
    norm: NormOption = None,
    clip: ClipOption = "0,1",
    bounds: ChosenBoundsOption = None,
    architecture: ArchitectureOption = None,
    input_shape: ShapeOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove robustness image by image, for a network or an ensemble."""
    set_threads(threads)
    place = usable_device(device)
    found = open_model(model, architecture, input_shape)
    network, notes = found.network, found.notes
    threat = open_threat(eps, norm, clip, notes)
    method = bounds or str(notes.get("bounds", "tightest"))
    images = open_data(data, notes, split, limit)
    with together(place) as (processes, tell):
        network.to(processes.device)
        about = {"threat": vars(threat), "bounds": method, "rank": processes.rank, "processes": processes.size}
        with resumed("certify", [network], [images], **about, device=str(place)):
            certificate = shared_examples(
                processes,
                (images.images, images.labels),
                lambda x, y: certify(network, x, y, threat, method=method, progress=tell),
            )
    if processes.rank > 0:
        return
    published = notes.get("published")
    show({**certificate.to_dict(), "published": published} if as_json else certificate, as_json)
    if isinstance(published, Mapping) and not as_json:
        count, total = published.get("not_certified"), published.get("images")
        typer.echo(f"published                 {count} of {total} {published.get('split')} images not certified")


def attack_command(
    model: ModelArgument,
    data: DataOption = None,
    split: SplitOption = "test",
    limit: LimitOption = None,
    eps: EpsOption = None,
    norm: NormOption = None,
    clip: ClipOption = "0,1",
    steps: StepsOption = 40,
    restarts: RestartsOption = 2,
    targets: Annotated[str, typer.Option("--targets", help="untargeted, targeted or both.")] = "untargeted",
    seed: Annotated[int, typer.Option("--seed", help="Of the random starts.")] = 0,
    autoattack: AutoAttackOption = "",
    out: Annotated[Path | None, typer.Option("--out", help="Save the adversarial images as .npz.")] = None,
    architecture: ArchitectureOption = None,
    input_shape: ShapeOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try to fool a network or an ensemble by projected gradient descent."""
    set_threads(threads)
    place = usable_device(device)
    if out is not None:
        check_writable(out)
    settings = AttackSettings(steps=steps, restarts=restarts, targets=targets, seed=seed,  # type: ignore[arg-type]
                              autoattack=autoattack)  # fmt: skip
    found = open_model(model, architecture, input_shape)
    network, notes = found.network, found.notes
    threat = open_threat(eps, norm, clip, notes)
    images = open_data(data, notes, split, limit)
    with together(place) as (processes, tell):
        network.to(processes.device)
        # A batch for each process, at least.
        settings = replace(settings, batch_size=min(settings.batch_size, -(-len(images) // processes.size)))
        about = {"threat": vars(threat), "settings": vars(settings), "rank": processes.rank}
        with resumed("attack", [network], [images], **about, processes=processes.size, device=str(place)):
            result = shared_examples(
                processes,
                (images.images, images.labels),
                lambda x, y: attack(network, x, y, threat, settings=settings, progress=tell),
                multiple=settings.batch_size,
            )
    if processes.rank > 0:
        return
    if out is not None:
        _save_points(out, result.adversarial, images.labels)
    show(result, as_json)


def compare_command(
    pool: PoolArgument,
    data: DataOption = None,
    limit: LimitOption = None,
    fit_data: FitDataOption = None,
    fit_limit: FitLimitOption = None,
    eps: EpsOption = None,
    norm: NormOption = None,
    clip: ClipOption = "0,1",
    bounds: BoundsOption = "tightest",
    kappa: KappaOption = "auto",
    max_members: MembersOption = None,
    max_megabytes: MegabytesOption = None,
    steps: StepsOption = 40,
    restarts: RestartsOption = 2,
    autoattack: AutoAttackOption = "",
    save: Annotated[Path | None, typer.Option("--save", help="Also write the result as JSON.")] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Also write report.html and figures there.")] = None,
    architecture: ArchitectureOption = None,
    input_shape: ShapeOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Best single network, uniform average, RobBoost, voting, cascade and oracles in one table."""
    set_threads(threads)
    place = usable_device(device)
    for target in (save, None if report is None else report / "report.html"):
        if target is not None:
            check_writable(target)
    found = open_pool(pool, architecture, input_shape)
    threat = open_threat(eps, norm, clip, found.notes)
    if data is not None and data.endswith(".npz") and fit_data is None:
        raise InputError(
            f"--data {data}: expected --fit-data, too: a file has one split, and weights need other images"
        )
    held = open_data(fit_data or data, found.notes, "heldout", fit_limit)
    test = open_data(data, found.notes, "test", limit)
    settings = Settings(
        bounds=bounds,
        robboost={"kappa": _kappa(kappa), "max_members": max_members, "max_megabytes": max_megabytes},
        attack=None if steps == 0 else AttackSettings(steps=steps, restarts=restarts, autoattack=autoattack),
    )
    about = {"threat": vars(threat), "settings": vars(settings), "report": report is not None, "device": device}
    to_device(found, place)
    with progress() as tell, resumed("compare", found.models, [held, test], **about):
        result = compare(
            found,
            fit=(held.images, held.labels),
            test=(test.images, test.labels),
            threat=threat,
            settings=settings,
            progress=tell,
        )
        if report is not None:
            facts = pool_facts(found, held, test)
            page = write_report(result, found, (test.images, test.labels), report, about=facts, progress=tell)
            sys.stderr.write(f"report: {page}\n")
    if save is not None:
        write_text(save, to_json({**result.to_dict(), "resources": resources().to_dict()}))
    show(result, as_json)


def report_command(
    pool: PoolArgument,
    out: Annotated[Path, typer.Option("--out", help="Folder for report.html and the figures.")] = Path("report"),
    data: DataOption = None,
    limit: LimitOption = None,
    fit_data: FitDataOption = None,
    fit_limit: FitLimitOption = None,
    eps: EpsOption = None,
    norm: NormOption = None,
    clip: ClipOption = "0,1",
    bounds: BoundsOption = "tightest",
    steps: StepsOption = 40,
    restarts: RestartsOption = 2,
    autoattack: AutoAttackOption = "",
    architecture: ArchitectureOption = None,
    input_shape: ShapeOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """The comparison, and one HTML page with its figures."""
    compare_command(
        pool, data=data, limit=limit, fit_data=fit_data, fit_limit=fit_limit, eps=eps, norm=norm, clip=clip,
        bounds=bounds, steps=steps, restarts=restarts, autoattack=autoattack, report=out, architecture=architecture,
        input_shape=input_shape, device=device, threads=threads, as_json=as_json,
    )  # fmt: skip


def to_device(pool: Pool, device: torch.device) -> None:
    """Moves the members."""
    for member in pool.models:
        member.to(device)


def pool_facts(pool: Pool, held: Dataset, test: Dataset) -> dict[str, Any]:
    """What a report says of files and data: names and hashes."""
    return {
        "members (sha256)": {member.name: member.sha256 for member in pool.members},
        "seeds of training": {member.name: member.seed for member in pool.members if member.seed is not None},
        "fit data": f"{held!r}, sha256 {held.sha256()}",
        "test data": f"{test!r}, sha256 {test.sha256()}",
    }


def _kappa(text: str) -> float | str:
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise InputError(f"--kappa {text!r}: expected a number above zero or auto") from None


def _save_points(path: Path, points: torch.Tensor, labels: torch.Tensor) -> None:
    import numpy as np

    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as stream:
            np.savez(stream, images=points.cpu().numpy(), labels=labels.cpu().numpy())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written ({error.strerror}); expected a place with space") from None
