"""The command line: ``cli`` has the commands, each in a module or package of its own."""
