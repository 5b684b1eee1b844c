"""``python -m tilewise``: the command line."""

from tilewise.cli import main

main()
