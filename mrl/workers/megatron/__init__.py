"""Megatron-Core roles: the only package that imports megatron."""
