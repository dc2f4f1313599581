"""Cutting samples into micro-batches and spreading them over ranks; pure Python."""
