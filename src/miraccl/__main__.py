"""Entry point of ``python -m miraccl``, which runs the command line of ``miraccl``."""

from miraccl.tools.cli import main

main()
