"""Hooks: which layers a model has, and their tensors while a forward pass runs."""
