"""`python -m dmst` is the command `dmst`."""

from dmst.cli import main

main()
