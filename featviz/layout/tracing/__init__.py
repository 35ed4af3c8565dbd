"""Where the values of a tensor lie in the image: followed through a forward pass, or
guessed."""
