"""Gradients: the target, the rule for ReLU, interventions, and the pass forward and
backward."""
