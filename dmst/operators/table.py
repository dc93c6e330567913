"""The table of operators: those of this package, those that a module puts in, and those that installed packages bring.

    OPERATORS["mean_pull"] = MeanPull                           in your module: known once it is imported

    [project.entry-points."dmst.operators"]                     in your package's pyproject.toml: known once it is installed
    mean_pull = "my_package:MeanPull"

Packages are looked through when a name is asked for that is not in the table, or when the names are listed; one of them is
imported when its operator is asked for. So one that is broken does no harm until it is used. The names of this package stay its
own: a saved model must mean the same operator everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from functools import cached_property
from importlib import metadata
from typing import Any

from dmst.errors import OptionError, UnknownNameError, in_one_line, unknown_name
from dmst.operators.base import Operator

GROUP = "dmst.operators"
REMEDY = (
    "An operator of your own is known once the module that puts it into dmst.OPERATORS is imported: "
    "`dmst --import MODULE ...`, or `import MODULE` in Python."
)


class OperatorTable(MutableMapping[str, type[Operator]]):
    """Name -> class."""

    def __init__(self, built_in: Mapping[str, type[Operator]]) -> None:
        self.built_in = dict(built_in)
        self._known = dict(built_in)  # and what modules put in

    @cached_property
    def _installed(self) -> dict[str, metadata.EntryPoint]:
        """What packages bring."""
        return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}

    def __getitem__(self, name: str) -> type[Operator]:
        return self._known[name] if name in self._known else _load(self._installed[name])

    def __setitem__(self, name: str, operator: type[Operator]) -> None:
        self._refuse_own(name)
        self._known[name] = _checked(operator)

    def __delitem__(self, name: str) -> None:
        self._refuse_own(name)
        del self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._installed

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._known, *self._installed)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _refuse_own(self, name: str) -> None:
        if name in self.built_in:
            raise OptionError(f"{name!r} is an operator of dmst itself: give yours another name.")

    def find(self, name: Any) -> type[Operator]:
        """The class called `name`, or an error that says how a name becomes known."""
        if not isinstance(name, str) or name not in self:
            raise UnknownNameError(f"{unknown_name('operator', name, self)} {REMEDY}")
        return self[name]

    def look(self) -> tuple[dict[str, type[Operator]], list[str]]:
        """Every operator that can be used, and a sentence for each that a package brings in vain. Imports them all."""
        known, problems = dict(self._known), []
        for name, entry in self._installed.items():
            if name in self.built_in:
                problems.append(f"operator {name!r} of {_package(entry)} is not used: dmst has one of that name.")
                continue
            try:
                known.setdefault(name, _load(entry))
            except OptionError as error:
                problems.append(str(error))
        return known, problems


def _load(entry: metadata.EntryPoint) -> type[Operator]:
    try:
        return _checked(entry.load())
    except (Exception, SystemExit) as error:  # a module can do anything when it is imported
        told = f"({in_one_line(error)}). Mend or uninstall {_package(entry)}."
        raise OptionError(f"operator {entry.name!r} of {_package(entry)} cannot be used {told}") from error


def _checked(operator: Any) -> type[Operator]:
    if not (isinstance(operator, type) and issubclass(operator, Operator)):
        what = operator.__name__ if isinstance(operator, type) else f"something of type {type(operator).__name__}"
        raise OptionError(f"{what} is no operator: an operator is a subclass of dmst.operators.Operator.")
    return operator


def _package(entry: metadata.EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
