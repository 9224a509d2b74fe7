"""How an app reaches the tasks: by its import path, or pickled."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import cloudpickle as untyped

from keylane.app import App
from keylane.errors import SettingsError

if TYPE_CHECKING:
    from types import ModuleType

    from keylane.app import Order

cloudpickle: Any = untyped


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """An app on its way. ``path`` are folders of the driver's, for tasks that run on the same machine."""

    reference: str | None = None
    pickled: bytes | None = None
    path: tuple[str, ...] = ()
    order: Order | None = None
    """Instead of the app's own."""

    def open(self) -> App:
        """The app. Raises :class:`SettingsError` when it cannot be had here."""
        app = self._unpack()
        return app if self.order is None else app.with_order(self.order)

    def _unpack(self) -> App:
        for folder in self.path:
            if Path(folder).is_dir() and folder not in sys.path:
                sys.path.append(folder)
        if self.reference is not None:
            return load(self.reference)
        try:
            app = cloudpickle.loads(self.pickled)
        except ImportError as error:
            raise SettingsError(
                f"the app needs a module that is not there on the worker: {error}. "
                "Install it there, or ship it with the job (spark-submit --py-files)"
            ) from error
        if not isinstance(app, App):
            raise SettingsError(f"not an app but a {type(app).__name__} arrived on the worker")
        return app


def pack(app: App) -> Parcel:
    """The app, pickled. Modules of its own that are not installed travel inside; what they import does not."""
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
            f"app {app.name!r} cannot be sent to Spark's workers: {error}. Stages may not hold on to open connections, "
            "locks or files: make them resources (@app.resource), which are opened on the worker"
        ) from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    return Parcel(pickled=pickled, path=tuple(p for p in sys.path if p and Path(p).is_dir()))


def _refuse_structs(app: App, travelling: set[str]) -> None:
    """A ``msgspec.Struct`` whose module travels inside would arrive without its fields, and say nothing."""
    for stage in app.stages:
        payload = stage.takes.payload
        if payload is not None and payload.kind == "msgspec" and payload.type.__module__ in travelling:
            raise SettingsError(
                f"app {app.name!r}, {stage.name!r}: the struct {payload.type.__name__!r} cannot be sent to Spark's "
                "workers pickled. Start the app with 'keylane run MODULE:APP', install its module there, or make "
                "the payload a dataclass or a pydantic model"
            )


def load(reference: str) -> App:
    """The app at ``module:attribute``. Raises :class:`SettingsError` that says which part of it is wrong."""
    name, _, attribute = reference.partition(":")
    if not name or not attribute:
        raise SettingsError(f"{reference!r}: needs MODULE:APP, for example examples.chat:app")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise SettingsError(
                f"{reference!r}: there is no module {error.name!r} here. It is looked for in the current folder and "
                "in the installed packages"
            ) from error
        raise SettingsError(f"{reference!r}: module {name!r} does not import: {error}") from error
    except (Exception, SystemExit) as error:  # a script without a main guard may exit
        why = f"{type(error).__name__}: {error}"
        raise SettingsError(f"{reference!r}: module {name!r} does not import: {why}") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            apps = [n for n, v in vars(module).items() if isinstance(v, App)]
            known = f"; its apps are: {', '.join(apps)}" if apps else "; it declares no app"
            raise SettingsError(f"{reference!r}: module {name!r} has no {attribute!r}{known}")
        found = getattr(found, part)
    if not isinstance(found, App):
        raise SettingsError(f"{reference!r} is a {type(found).__name__}, not an App")
    return found


def _own_modules(app: App) -> list[ModuleType]:
    """Modules that declare the app's functions and are not installed packages: workers could not import them."""
    installed = tuple(os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib"))
    functions = [s.function for s in app.stages] + [r.function for r in app.resources.values()]
    payloads = [s.takes.payload.type for s in app.stages if s.takes.payload is not None]
    version = None if app.versions is None else app.versions.read
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
