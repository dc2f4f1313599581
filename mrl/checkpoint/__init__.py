"""Saving and resuming: atomic checkpoint folders and the trainer's state (no torch); `convert`."""
