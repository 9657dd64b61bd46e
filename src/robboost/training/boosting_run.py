"""`python -m robboost.training.boosting RECIPE --out DIR --minutes M`: boosting with torch and numpy alone.

Without further options the members of the recipe are boosted. --alone trains the same members side by side, each for
itself, and fits their weights: what boosting has to beat. --tune moves all members of a finished ensemble at once.
Each of them ends with one look at the test set: a table, and a file DIR/NAME/KIND.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from robboost.data import load_dataset
from robboost.errors import RobBoostError
from robboost.models import Ensemble, load_model
from robboost.training.boosting import Stage
from robboost.training.boosting_config import load_boost
from robboost.training.boosting_experiments import Experiment, Outcome, boosted, by_themselves, tuned
from robboost.training.boosting_results import against, measure, table
from robboost.training.pool import Progress, RunOptions

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Trains, measures and prints a table; 0: done, 2: wrong input."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except RobBoostError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m robboost.training.boosting",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="file (.toml, .json), or a shipped recipe such as mnist-0.3")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; one found there goes on")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--alone", action="store_true", help="train the members each for itself, then fit the weights")
    kind.add_argument("--tune", type=Path, metavar="ENSEMBLE", help="ensemble file, or folder of a pool, to fine-tune")
    parser.add_argument("--minutes", type=float, help="time limit of the training; certificates come on top")
    parser.add_argument("--epochs", type=int, help="epochs of every member, in place of the recipe's")
    parser.add_argument("--stages", type=int, help="only the first so many members")
    parser.add_argument("--lr", type=float, help="with --tune: first learning rate (default: a fifth of the recipe's)")
    parser.add_argument("--against", type=Path, nargs="+", default=[], help="ensemble files, for the final table")
    parser.add_argument("--bounds", help="of the certificates, such as ibp+crown-ibp+crown (default: the recipe's)")
    parser.add_argument("--limit", type=int, help="use only so many images for training")
    parser.add_argument("--measured", type=int, help="use only so many held-out and so many test images")
    parser.add_argument("--device", help="cpu, cuda, ...; default: the GPU where there is one")
    parser.add_argument("--report-seconds", type=float, default=RunOptions.report_seconds, help="between two reports")
    return parser


def _run(arguments: argparse.Namespace) -> None:
    config = load_boost(arguments.recipe)
    if arguments.epochs is not None:
        config = config.with_epochs(arguments.epochs)
    if arguments.stages is not None:
        config = replace(config, stages=config.stages[: max(1, arguments.stages)])
    if arguments.bounds is not None:
        config = replace(config, bounds=arguments.bounds)
    others = {str(path): _one_ensemble(path) for path in arguments.against}
    options = RunOptions(
        out=arguments.out,
        device=arguments.device,
        minutes=arguments.minutes,
        report_seconds=arguments.report_seconds,
    )
    data = load_dataset(config.dataset, split="train").at_most(arguments.limit)
    heldout, test = (
        load_dataset(config.dataset, split=split).at_most(arguments.measured) for split in ("heldout", "test")
    )
    experiment = Experiment(config, data, heldout, options, _say, _say_stage)
    start = time.monotonic()
    outcome = _outcome(experiment, arguments)
    trained = time.monotonic()
    ensembles = outcome.ensembles | others
    rows = measure(ensembles, test, config.threat, config.certificate, options.chosen_device)
    seconds = {"training": trained - start, "test": time.monotonic() - trained}
    result = {
        "kind": outcome.kind,
        "threat": str(config.threat),
        "bounds": config.certificate,
        "test_images": len(test),
        "chosen": outcome.chosen,
        "test": [row.to_dict() for row in rows],
        "paired": {name: found.to_dict() for name, found in against(rows, outcome.chosen).items()},
        "seconds": seconds,
        **outcome.entries,
    }
    file = experiment.folder / f"{outcome.kind}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _line(f"\n{config.name}, {outcome.kind}: {config.threat}, bounds {config.certificate}, {len(test)} test images")
    _line(table(rows, outcome.chosen))
    _line(f"training {seconds['training']:.0f} s, test set {seconds['test']:.0f} s; {file}")


def _outcome(experiment: Experiment, arguments: argparse.Namespace) -> Outcome:
    if arguments.tune is not None:
        return tuned(experiment, arguments.tune, arguments.lr)
    return by_themselves(experiment) if arguments.alone else boosted(experiment)


def _one_ensemble(path: Path) -> Ensemble:
    found = load_model(path)
    return found if isinstance(found, Ensemble) else Ensemble([found], [1.0], names=[path.stem])


def _say(progress: Progress) -> None:
    _line(
        f"{progress.member:32s} epoch {progress.epoch:3d}/{progress.epochs} loss {progress.loss:7.4f}"
        f" robust {progress.robust:6.3f} {progress.seconds:6.0f} s, {progress.seconds_left:.0f} s left"
    )


def _say_stage(stage: Stage) -> None:
    _line(
        f"{stage.member:32s} held out: verified error {100 * stage.verified_error:.2f}"
        f" (alone {100 * stage.alone_verified_error:.2f}), clean {100 * stage.clean_error:.2f};"
        f" {stage.size_mb:.2f} MB, {stage.epochs} epochs, {stage.seconds:.0f} s"
    )


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
