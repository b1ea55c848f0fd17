"""Imports are most of what a rank does before its first step: nobody looks for garbage meanwhile, and what it has no
use for waits until somebody has.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Collection
from contextlib import suppress
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from cpuft.rank.script import ModulePatcher

_UNUSED = {
    # For losses of models that find things in pictures: transformers imports those for any model.
    "scipy.optimize": ("linear_sum_assignment",),
    # For SageMaker, of which accelerate knows.
    "boto3": (),
}


def hurry() -> None:
    """To be called before torch is imported; `settle` ends it."""
    gc.disable()  # torch and transformers take 3.1 s of a core instead of 3.9
    for name, functions in _UNUSED.items():
        defer(name, functions)
    sys.meta_path.insert(0, ModulePatcher({"transformers.utils.import_utils": list_once}))


def settle() -> None:
    """To be called when a rank is about to train: garbage is looked for again, but not among what is there now."""
    _listed.clear()
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


_listed: dict[str, Any] = {}


def list_once(import_utils: Any) -> None:
    """Let transformers read the files of its models, over 2,000, for what they offer, once: it does so as a whole, and
    then for its part `models`, 0.3 s each time.
    """
    own = getattr(import_utils, "create_import_structure_from_path", None)
    if own is None:
        return

    @functools.wraps(own)
    def read(path: str) -> Any:
        folder = str(path) if os.path.isdir(path) else os.path.dirname(path)
        if folder not in _listed:
            _listed[folder] = own(folder)
        return _listed[folder]

    import_utils.create_import_structure_from_path = read


HUB_SECONDS = 3.0
"""Time in which the Hugging Face hub must accept a connection."""


@functools.cache
def find_hub_problem() -> str:
    """Why the Hugging Face hub cannot be asked, in words for the middle of an error; empty if it can.

    If it cannot, the hub's client is told to read its cache only. The client itself would try again five times, with
    pauses that add up to 25 s for each file.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids asking the Hugging Face hub"
    url = urlsplit(constants.ENDPOINT)
    proxy = urllib.request.getproxies().get(url.scheme, "")
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if _accepts_connection(url.hostname or "", url.port or (443 if url.scheme == "https" else 80)):
        return ""
    constants.HF_HUB_OFFLINE = True
    for name, flag in (("transformers.utils.hub", "_is_offline_mode"), ("datasets.config", "HF_HUB_OFFLINE")):
        if hasattr(sys.modules.get(name), flag):
            setattr(sys.modules[name], flag, True)
    return f"the Hugging Face hub does not answer within {HUB_SECONDS:.0f} s"


def _accepts_connection(host: str, port: int) -> bool:
    """Whether a TCP connection is accepted within HUB_SECONDS. On a thread, because a name server may not answer."""
    accepted = threading.Event()

    def connect() -> None:
        with suppress(OSError, ValueError), socket.create_connection((host, port), timeout=HUB_SECONDS):
            accepted.set()
        ended.set()

    ended = threading.Event()
    threading.Thread(target=connect, daemon=True).start()
    ended.wait(HUB_SECONDS)
    return accepted.is_set()


def defer(name: str, functions: Collection[str] = ()) -> None:
    """Import a module only once something of it is used: one of `functions` called, or anything else named.

    Nothing happens where it is imported already, or not installed.
    """
    spec = None
    with suppress(ModuleNotFoundError):
        spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None:
        return
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    vars(module)["_functions"] = frozenset(functions)
    module.__class__ = _Deferred


class _Deferred(ModuleType):
    """A module that was not executed yet: asked are names that it has not got."""

    def __getattr__(self, name: str) -> Any:
        if name in vars(self)["_functions"]:
            return _call_later(self, name)
        return getattr(_execute(self), name)


def _execute(module: ModuleType) -> ModuleType:
    """The module itself, whole. As importlib.util.LazyLoader has it, the object stays the same."""
    if type(module) is not ModuleType:
        module.__class__ = ModuleType
        loader = module.__spec__ and module.__spec__.loader
        assert loader
        loader.exec_module(module)
    return module


def _call_later(module: ModuleType, name: str) -> Callable[..., Any]:
    return lambda *arguments, **named: getattr(_execute(module), name)(*arguments, **named)
