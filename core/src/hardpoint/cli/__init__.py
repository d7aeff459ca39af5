"""The command line. ``main`` holds the list of commands; each command is a module that is imported when it is run."""
