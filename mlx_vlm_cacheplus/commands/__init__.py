"""One module a command: add_arguments(parser), run(options) -> exit code."""
