"""`dmst --import MODULE`: a module of the user, imported before the verb runs, so that its operators are known to it."""

from __future__ import annotations

import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from dmst.errors import OptionError, in_one_line


def import_module(what: str) -> None:
    """Import `my_package.my_module` or `folder/my_op.py`. The current folder, or that of the file, is importable."""
    path = Path(what)
    is_file = path.suffix == ".py"
    sys.path.insert(0, str(path.resolve().parent if is_file else Path.cwd()))
    try:
        if is_file:
            spec = spec_from_file_location(path.stem, path)
            assert spec is not None and spec.loader is not None
            module = module_from_spec(spec)
            sys.modules.setdefault(path.stem, module)  # a file may have the name of a module that is in use
            spec.loader.exec_module(module)
        else:
            importlib.import_module(what)
    except (Exception, SystemExit) as error:  # a module can do anything when it is imported
        raise OptionError(
            f"--import {what}: the module could not be imported ({in_one_line(error)}). Give the path of a .py file, or the "
            "name of a module in this folder or installed."
        ) from error
