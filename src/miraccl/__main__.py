"""``python -m miraccl`` is the command ``miraccl``."""

from miraccl.tools.cli import main

main()
