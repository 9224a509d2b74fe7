"""``python -m keylane``."""

from keylane.cli.main import main

main()
