"""The paper's tables 1 to 3 from measured pools, each row beside the paper's, and what diversity buys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from robboost.errors import InputError
from robboost.reproduce.paper import ELIMINATED, MAIN, SUBSAMPLED
from robboost.reproduce.settings import SETTINGS, Setting, chosen_settings
from robboost.tables import percent, test_sentence

__all__ = ["DIVERSITY", "TABLES", "Table", "diversity", "table1", "table2", "table3"]

# Gives the figures of a pool by name, or None where there is no such pool.
Figures = Callable[[str], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Table:
    """A table as texts, with sentences below it, and the figures that it was made of by pool."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    figures: Mapping[str, Mapping[str, Any]]

    def __str__(self) -> str:
        cells = [self.columns, *self.rows]
        widths = [max(len(row[n]) for row in cells) for n in range(len(self.columns))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([self.title, lines[0], rule, *lines[1:], *self.notes])

    def to_markdown(self) -> str:
        """The same as a Markdown table and a list."""
        lines = [f"| {' | '.join(row)} |" for row in ([*self.columns], ["---"] * len(self.columns), *self.rows)]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]).strip()

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the figures of each pool are those of `measure`."""
        return {
            "title": self.title,
            "columns": list(self.columns),
            "rows": [list(row) for row in self.rows],
            "notes": list(self.notes),
            "figures": dict(self.figures),
        }


def table1(settings: Sequence[str], figures: Figures) -> Table:
    """Table 1: the share of (example, target) pairs that need no optimisation."""
    rows: list[tuple[str, ...]] = []
    found = _found([(s, s.faithful) for s in chosen_settings(settings)], figures)
    notes = []
    for setting, pool, values in found.rows:
        split = "train" if "train" in values["eliminated"] else "test"
        counts = values["eliminated"][split]
        pairs, examples = counts["pairs"], counts["examples"]
        paper = ELIMINATED[setting.name]
        rows.append(
            (
                setting.label,
                pool,
                f"{100 * counts['pairs_robust_to_all'] / pairs:.2f}",
                f"{100 * counts['pairs_robust_to_none'] / pairs:.2f}",
                f"{paper.robust_to_all:.2f}",
                f"{paper.robust_to_none:.2f}",
                f"{100 * counts['examples_robust_to_all'] / examples:.2f}",
                f"{100 * counts['examples_robust_to_none'] / examples:.2f}",
                f"{examples} {split}",
            )
        )
        notes.append(
            f"{setting.label}: of the {counts['pairs_robust_to_none']} pairs that no member certifies, the mix"
            f" certifies {counts['pairs_none_but_mix']}: removing them is no exact step"
        )
    columns = (
        "setting",
        "pool",
        "pairs robust to all %",
        "pairs robust to none %",
        "paper: all",
        "paper: none",
        "images robust to all %",
        "images robust to none %",
        "images",
    )
    return Table("Table 1: removed before optimisation", columns, tuple(rows), (*notes, *found.missing), found.used)


def table2(settings: Sequence[str], figures: Figures) -> Table:
    """Table 2: verified error on train and test, clean, PGD, size; the faithful pool and our best one."""
    rows: list[tuple[str, ...]] = []
    chosen = chosen_settings(settings)
    found = _found([(s, pool) for s in chosen for pool in (s.faithful, s.name)], figures)
    notes = []
    for setting in chosen:
        for name, paper in MAIN[setting.name].items():
            rows.append(
                (
                    setting.label,
                    "paper",
                    name,
                    f"{paper.verified_train:.2f}",
                    f"{paper.verified_test:.2f}",
                    f"{paper.clean:.2f}",
                    f"{paper.pgd:.2f}",
                    f"{paper.megabytes:.1f}",
                    "-",
                )
            )
        for _, pool, values in (entry for entry in found.rows if entry[0] is setting):
            best = values["best_single"]
            for label, name in ((f"best single ({best})", best), ("uniform", "uniform"), ("RobBoost", "RobBoost")):
                rows.append((setting.label, pool, label, *_main_cells(values["rows"][name])))
            for what, test in values["tests"].items():
                notes.append(f"{pool}, {test_sentence(what, test)}")
            notes.append(_about(pool, values))
    columns = ("setting", "pool", "mix", "verified % train", "verified % test", "clean %", "PGD %", "MB", "members")
    return Table("Table 2: verified error", columns, tuple(rows), (*notes, *found.missing), found.used)


def table3(settings: Sequence[str], figures: Figures) -> Table:
    """Table 3: five networks K on 80% of the pixels each, naive and RobBoost."""
    rows: list[tuple[str, ...]] = []
    chosen = chosen_settings(settings, tuple(SUBSAMPLED))
    found = _found([(s, s.subsampled) for s in chosen], figures)
    notes = []
    for setting in chosen:
        paper = SUBSAMPLED[setting.name]
        for what, numbers in (("clean", paper.clean), ("verified", paper.verified)):
            rows.append((setting.label, "paper", what, *(f"{number:.2f}" for number in numbers)))
        for _, pool, values in (entry for entry in found.rows if entry[0] is setting):
            names = [*values["names"], "uniform", "RobBoost"]
            if len(names) != 7:
                raise InputError(f"{pool}: {len(names) - 2} members; expected five (the paper's table 3)")
            for what, key in (("clean", "clean"), ("verified", "verified_test")):
                rows.append((setting.label, pool, what, *(percent(values["rows"][name][key]) for name in names)))
            for sentence, test in values["tests"].items():
                notes.append(f"{pool}, {test_sentence(sentence, test)}")
            notes.append(_about(pool, values))
    columns = ("setting", "pool", "test error %", "1", "2", "3", "4", "5", "uniform", "RobBoost")
    return Table("Table 3: feature subsampling", columns, tuple(rows), (*notes, *found.missing), found.used)


def diversity(settings: Sequence[str], figures: Figures) -> Table:
    """What diversity buys: five seeds, five architectures, five methods of training, at equal size (MNIST 0.3)."""
    del settings
    setting = SETTINGS["mnist-0.3"]
    found = _found([(setting, pool) for pool in DIVERSITY], figures)
    rows, notes = [], []
    for _, pool, values in found.rows:
        best = values["rows"][values["best_single"]]
        errors = (best, values["rows"]["uniform"], values["rows"]["RobBoost"])
        rows.append(
            (
                pool.removeprefix("diversity-"),
                str(len(values["names"])),
                f"{values['rows']['uniform']['megabytes']:.2f}",
                *(percent(row["verified_test"], interval=True) for row in errors),
                percent(values["some_member"]),
                *(percent(row["clean"]) for row in errors),
            )
        )
        notes += [f"{pool}, {test_sentence(what, test)}" for what, test in values["tests"].items()]
        notes.append(_about(pool, values))
    columns = (
        "five members by",
        "members",
        "MB",
        "best single, verified %",
        "uniform, verified %",
        "RobBoost, verified %",
        "no member certifies %",
        "best single, clean %",
        "uniform, clean %",
        "RobBoost, clean %",
    )
    return Table("What diversity buys: MNIST 0.3", columns, tuple(rows), (*notes, *found.missing), found.used)


DIVERSITY = ("diversity-seeds", "diversity-architectures", "diversity-methods")
TABLES: Mapping[str, Callable[[Sequence[str], Figures], Table]] = {
    "table1": table1,
    "table2": table2,
    "table3": table3,
    "diversity": diversity,
}


@dataclass(frozen=True)
class _Found:
    rows: list[tuple[Setting, str, Mapping[str, Any]]]
    missing: tuple[str, ...]
    used: dict[str, Mapping[str, Any]]


def _found(wanted: Sequence[tuple[Setting, str]], figures: Figures) -> _Found:
    rows, missing = [], []
    for setting, pool in wanted:
        values = figures(pool)
        if values is None:
            missing.append(pool)
        else:
            rows.append((setting, pool, values))
    if not rows:
        raise InputError(
            f"none of the pools {', '.join(missing)} is there; expected at least one below --pools, or --train"
        )
    notes = (f"no pool (not trained yet): {', '.join(missing)}",) if missing else ()
    return _Found(rows, notes, {pool: values for _, pool, values in rows})


def _main_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        percent(row["verified_train"]),
        percent(row["verified_test"], interval=True),
        percent(row["clean"]),
        percent(row["attack"]),
        f"{row['megabytes']:.2f}",
        str(row["members"]),
    )


def _about(pool: str, values: Mapping[str, Any]) -> str:
    fit, test, train = values["fit"], values["test"], values["train"]
    seen = "" if train is None else f", train columns on {train['images']} training images"
    where = "" if test["name"] == _dataset(pool) else f" of {test['name']}"
    return (
        f"{pool}: bounds {values['bounds']}; weights fitted on {fit['images']} {fit['split']} images,"
        f" measured on {test['images']} test images{where}{seen}; some member certifies all but"
        f" {percent(values['some_member'])} %"
    )


def _dataset(pool: str) -> str:
    """The data set that the pool's name speaks of."""
    return next((setting.dataset for name, setting in SETTINGS.items() if name in pool), "mnist")
