"""`python -m peagle`, the same as the command `peagle`."""

from peagle.cli import main

main()
