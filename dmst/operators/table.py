"""The table of operators: those of this package, those that a module puts in, and those that installed packages bring.

    OPERATORS["mean_pull"] = MeanPull                           in your module: known once it is imported

    [project.entry-points."dmst.operators"]                     in your package's pyproject.toml: known once it is installed
    mean_pull = "my_package:MeanPull"

A package is imported when its operator is asked for. So one that is broken does no harm until it is used. The names of this
package stay its own: a saved model must mean the same operator everywhere.
"""

from __future__ import annotations

from collections import UserDict
from importlib import metadata
from typing import Any

from dmst.errors import OptionError, UnknownNameError, in_one_line, unknown_name
from dmst.operators.base import Operator

GROUP = "dmst.operators"
REMEDY = (
    "An operator of your own is known once the module that puts it into dmst.OPERATORS is imported: "
    "`dmst --import MODULE ...`, or `import MODULE` in Python."
)


class OperatorTable(UserDict[str, Any]):
    """Name -> class; `data` holds the entry point in place of a class that is not imported yet."""

    def __init__(self, built_in: dict[str, type[Operator]]) -> None:
        super().__init__()
        self.built_in = built_in
        self.data = dict(built_in)
        for entry in metadata.entry_points(group=GROUP):
            self.data.setdefault(entry.name, entry)

    def __getitem__(self, name: str) -> type[Operator]:
        found = self.data[name]
        return _load(found) if isinstance(found, metadata.EntryPoint) else found

    def __setitem__(self, name: str, operator: type[Operator]) -> None:
        if name in self.built_in:
            raise OptionError(f"{name!r} is an operator of dmst itself: give yours another name.")
        self.data[name] = _checked(operator)

    def find(self, name: Any) -> type[Operator]:
        """The class called `name`, or an error that says how a name becomes known."""
        if not isinstance(name, str) or name not in self:
            raise UnknownNameError(f"{unknown_name('operator', name, self)} {REMEDY}")
        return self[name]

    def look(self) -> tuple[dict[str, type[Operator]], list[str]]:
        """Every operator that can be used, and a sentence for each that a package brings in vain. Imports them all."""
        known, problems = {}, []
        for name in self:
            try:
                known[name] = self[name]
            except OptionError as error:
                problems.append(str(error))
        return known, problems


def _load(entry: metadata.EntryPoint) -> type[Operator]:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
    try:
        return _checked(entry.load())
    except (Exception, SystemExit) as error:  # a module can do anything when it is imported
        told = f"({in_one_line(error)}). Mend or uninstall {package}."
        raise OptionError(f"operator {entry.name!r} of {package} cannot be used {told}") from error


def _checked(operator: Any) -> type[Operator]:
    if not (isinstance(operator, type) and issubclass(operator, Operator)):
        what = operator.__name__ if isinstance(operator, type) else f"something of type {type(operator).__name__}"
        raise OptionError(f"{what} is no operator: an operator is a subclass of dmst.operators.Operator.")
    return operator
