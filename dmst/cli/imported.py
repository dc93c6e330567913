"""`dmst --import MODULE`: a module of the user, imported before the verb runs, so that its operators are known to it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from dmst.errors import OptionError, in_one_line


def import_module(what: str) -> None:
    """Import `my_package.my_module` or `folder/my_op.py`. The current folder, or that of the file, is importable."""
    path = Path(what)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise OptionError(f"--import {what}: the file does not exist. Give the path of a .py file, or the name of a module.")
    if is_file and not path.stem.isidentifier():
        raise OptionError(f"--import {what}: {path.stem!r} cannot be the name of a module. Rename the file, as my_op.py.")
    name, folder = (path.stem, str(path.parent.resolve())) if is_file else (what, str(Path.cwd()))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):  # what it imports is missing
            raise _broken(what, error) from error
        raise OptionError(
            f"--import {what}: the module {error.name} is neither in this folder nor installed. "
            "Change to its folder, install it, or give the path of its .py file."
        ) from error
    except (Exception, SystemExit) as error:  # a module can do anything when it is imported
        raise _broken(what, error) from error
    found = getattr(module, "__file__", None)
    if is_file and not (found and Path(found).resolve() == path.resolve()):
        raise OptionError(f"--import {what}: another module has the name {name}. Rename the file.")


def _broken(what: str, error: BaseException) -> OptionError:
    return OptionError(
        f"--import {what}: the module could not be imported ({in_one_line(error)}). Correct it, or leave --import out."
    )
