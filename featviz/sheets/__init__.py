"""Figures and animations made of runs: rows of layers and channels, columns of images."""
