"""A small model and real tasks, made on the spot: what a first run needs, without a download."""
