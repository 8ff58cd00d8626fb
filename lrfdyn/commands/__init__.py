"""One module per sub-command: its first docstring line is the help, `add_arguments` and `run` the rest. `bar` is
shared."""
