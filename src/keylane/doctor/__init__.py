"""What ``keylane doctor`` looks at: :mod:`facts` are found by the ``probe_*`` modules and judged by :mod:`judge`."""
