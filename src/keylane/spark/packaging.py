"""Shipping an app to the tasks: by its import path, or pickled."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import cloudpickle as untyped

from keylane.errors import SettingsError
from keylane.spec import AppSpec

if TYPE_CHECKING:
    from types import ModuleType

    from keylane.lanes.ordering import OrderName

cloudpickle: Any = untyped


@dataclass(frozen=True, slots=True, kw_only=True)
class AppPackage:
    """A packaged app. ``path`` has the driver's folders, for tasks on the same machine."""

    reference: str | None = None
    pickled: bytes | None = None
    path: tuple[str, ...] = ()
    order: OrderName | None = None
    """Overrides the app's ordering."""

    def open(self) -> AppSpec:
        """Load the app. Raises :class:`SettingsError` if that fails here."""
        app = self._unpack()
        return app if self.order is None else app.with_order(self.order)

    def _unpack(self) -> AppSpec:
        for folder in self.path:
            if Path(folder).is_dir() and folder not in sys.path:
                sys.path.append(folder)
        if self.reference is not None:
            return load(self.reference)
        try:
            app = cloudpickle.loads(self.pickled)
        except ImportError as error:
            raise SettingsError(
                f"the app needs a module that the worker does not have: {error}. "
                "Install it there, or ship it with the job (spark-submit --py-files)"
            ) from error
        if not isinstance(app, AppSpec):
            raise SettingsError(f"expected an App on the worker, got a {type(app).__name__}")
        return app


def pack(app: AppSpec) -> AppPackage:
    """Pickle the app with its own modules that are not installed, but not what those import."""
    registered = cloudpickle.list_registry_pickle_by_value()
    own = _own_modules(app)
    _refuse_structs(app, {m.__name__ for m in own} | {"__main__", *registered})
    modules = [m for m in own if m.__name__ not in {"__main__", *registered}]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled = cloudpickle.dumps(app)
    except Exception as error:
        raise SettingsError(
            f"app {app.name!r} cannot be sent to Spark's workers: {error}. Stages must not hold open connections, "
            "locks or files: make them resources (@app.resource), which are opened on the worker"
        ) from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    return AppPackage(pickled=pickled, path=tuple(p for p in sys.path if p and Path(p).is_dir()))


def _refuse_structs(app: AppSpec, travelling: set[str]) -> None:
    """Reject a ``msgspec.Struct`` of a pickled module: it would silently lose its fields."""
    for stage in app.stages:
        payload = stage.takes.payload
        if payload is not None and payload.kind == "msgspec" and payload.type.__module__ in travelling:
            raise SettingsError(
                f"app {app.name!r}, {stage.name!r}: the struct {payload.type.__name__!r} cannot be sent to Spark's "
                "workers pickled. Start the app with 'keylane run MODULE:APP', install its module there, or make "
                "the payload a dataclass or a pydantic model"
            )


def load(reference: str) -> AppSpec:
    """Import the app at ``module:attribute``. Raises :class:`SettingsError` naming the part that is wrong."""
    name, _, attribute = reference.partition(":")
    if not name or not attribute:
        raise SettingsError(f"expected MODULE:APP, such as examples.chat:app, got {reference!r}")
    if name.endswith(".py") or "/" in name or "\\" in name:
        file = Path(name)
        where = "" if str(file.parent) == "." else f" in the folder {file.parent}"
        raise SettingsError(
            f"{reference!r}: expected a module's name, not its file. Run 'keylane run {file.stem}:{attribute}'{where}"
        )
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise SettingsError(
                f"{reference!r}: module {error.name!r} was not found in the current folder or in the installed "
                "packages"
            ) from error
        raise SettingsError(
            f"{reference!r}: could not import module {name!r}: {error}{_where(error)}"
        ) from error
    except (Exception, SystemExit) as error:  # a script without a main guard may exit
        why = f"{type(error).__name__}: {error}{_where(error)}"
        raise SettingsError(f"{reference!r}: could not import module {name!r}: {why}") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            apps = [n for n, v in vars(module).items() if _spec_of(v) is not None]
            known = f"; its apps are: {', '.join(apps)}" if apps else "; it declares no app"
            raise SettingsError(f"{reference!r}: module {name!r} has no {attribute!r}{known}")
        found = getattr(found, part)
    spec = _spec_of(found)
    if spec is None:
        raise SettingsError(f"{reference!r}: expected an App, got a {type(found).__name__}")
    return spec


def _spec_of(found: object) -> AppSpec | None:
    """Return the app's specification; None for anything else."""
    spec = getattr(found, "spec", None)
    return spec if isinstance(spec, AppSpec) else None


def _where(error: BaseException) -> str:
    """Return the file and line of the app's own code where an import failed."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" (at {error.filename}, line {error.lineno})" if error.filename not in str(error) else ""
    frames = traceback.extract_tb(error.__traceback__)
    installed = sysconfig.get_path("stdlib")
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(("<frozen", installed)) and Path(frame.filename) != Path(__file__)
    ]
    return f" (at {own[-1].filename}, line {own[-1].lineno})" if own else ""


def _own_modules(app: AppSpec) -> list[ModuleType]:
    """Return the modules of the app's functions that are not installed, so workers cannot import them."""
    installed = tuple(os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib"))
    functions = [s.function for s in app.stages] + [r.function for r in app.resources.values()]
    payloads = [s.takes.payload.type for s in app.stages if s.takes.payload is not None]
    version = None if app.versions is None else app.versions.version_from
    things = [*functions, *payloads, app.decode, app.observer, app.event_type, version]
    found: dict[str, ModuleType] = {}
    for given in things:
        thing = given
        while isinstance(thing, functools.partial):
            thing = thing.func
        owner = thing if hasattr(thing, "__module__") else type(thing)
        module = sys.modules.get(getattr(owner, "__module__", "") or "")
        file = getattr(module, "__file__", None)
        if module is None or file is None or module.__name__.partition(".")[0] in ("keylane", "builtins"):
            continue
        if not os.path.realpath(file).startswith(installed):
            found[module.__name__] = module
    return list(found.values())
