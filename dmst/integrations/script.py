"""`python -m dmst.integrations.timm SCRIPT ...`: a script of timm, run as `python SCRIPT ...` runs it, with our models known.

python -m dmst.integrations.timm validate.py --model dmst_cifar10 --pretrained --data-dir photos
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

from dmst.errors import DmstError, OptionError
from dmst.terminal import say


def main(module: str, arguments: list[str]) -> None:
    """Import `module`, which is what registers the models; then run the script. Only errors before it are ours to tell."""
    try:
        if not arguments or not Path(arguments[0]).is_file():
            raise OptionError(f"Name a script of timm, such as its validate.py: python -m {module} SCRIPT [ARGUMENTS]")
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        importlib.import_module(module)
    except DmstError as error:
        say(*str(error).split("\n"), err=True, style="red")
        raise SystemExit(error.exit_code) from None
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
