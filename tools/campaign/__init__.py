"""The fault campaign: an app under load, faults by seed, and a judge. ``python -m campaign --help`` teaches it."""
