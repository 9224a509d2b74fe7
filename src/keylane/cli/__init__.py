"""The commands of ``keylane``, one module each; ``main`` puts them together."""
