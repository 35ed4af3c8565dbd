"""Maps to a picture and its file: statistics, levels, tiles, grid, encoders."""
