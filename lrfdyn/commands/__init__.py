"""One module per sub-command: its docstring is the help, `add_arguments` and `run` the rest; `shared` is for all."""
