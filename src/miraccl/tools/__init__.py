"""Command line: ``cli`` lists the commands, each in a module or package of its own."""
