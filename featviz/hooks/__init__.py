"""Hooks: which layers a model has, and their tensors while a forward pass runs.

A model in use is in eval mode and is given back as it was (`eval_mode`). Its layers are modules, or
functions that modules call (`layers`, `functions`); `selectors` choose among them, `capture` hands
their tensors on, and `forward` calls the model.
"""
