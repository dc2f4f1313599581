"""One script per question. Each has a docstring that asks it and `run(args) -> result`."""
