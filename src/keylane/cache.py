"""Cache folder, for what Keylane creates once per machine: jars, class archives, the workers' Python."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from keylane.errors import SettingsError


def cache_folder() -> Path:
    """The folder in KEYLANE_CACHE, or this user's cache folder.

    Raises SettingsError if others may write there, because programs in it run as this user.
    """
    folder = Path(os.environ.get("KEYLANE_CACHE") or platformdirs.user_cache_dir("keylane")).absolute()
    try:
        found = folder.stat()
    except OSError:  # it does not exist yet, or its first use will report the error
        return folder
    if found.st_uid not in (os.getuid(), 0):
        problem = f"belongs to another user ({found.st_uid})"
    elif found.st_mode & 0o002 or (found.st_mode & 0o020 and found.st_gid != os.getgid()):
        problem = f"can be written by others (mode {found.st_mode & 0o7777:o})"
    else:
        return folder
    raise SettingsError(
        f"expected a cache folder that only this user can write, found {folder}, which {problem}: a program that "
        f"others put there would run as this user. Run 'chmod go-w {folder}', or set KEYLANE_CACHE to a folder of "
        "your own"
    )
