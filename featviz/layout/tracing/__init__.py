"""Where in the image the values of a tensor lie: followed through a forward pass, or
guessed from shapes."""
