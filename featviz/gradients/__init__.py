"""Gradients: what is differentiated, how it flows back, what is changed on the way."""
