"""`python -m featviz`, and with it `torchrun -m featviz`."""

from featviz.cli import main

if __name__ == "__main__":
    main()
