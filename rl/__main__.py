"""`python -m rl`, as torchrun starts it."""

from rl.cli import main

main()
