"""A run, from options to results; and `cpuft.launch(...)`, because the package can be called like a function."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class _CallablePackage(types.ModuleType):
    """The class of this package's module object. `cpuft.launch` names both the package and the function of the API."""

    def __call__(
        self,
        target: Callable[..., Any] | Mapping[str, Any] | Any = None,
        /,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Train, or call a function on the ranks of one or more hosts: see `cpuft.api.launch`."""
        # Named by a text, because the modules of this package must not import the API.
        return importlib.import_module("cpuft.api").launch(target, args=args, kwargs=kwargs, **options)


sys.modules[__name__].__class__ = _CallablePackage
