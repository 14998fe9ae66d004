"""Imports the package `etcd3` on a current protobuf.

etcd3 0.12.0 ships generated modules that build their descriptors in a way protobuf removed, so a
plain `import etcd3` fails. Each of those modules still carries its serialized descriptor as a
literal: it is read from the source without running it, added to the default descriptor pool, and
message classes are built from it. The same reading fits the package's later, unreleased versions.
Called by `etcd_store.py` only, before anything else imports etcd3.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_PACKAGE: Final = "etcd3.etcdrpc"
_MODULES: Final = ("kv_pb2", "auth_pb2", "rpc_pb2")
"""In the order in which the files depend on each other."""
_lock = threading.Lock()
PARSE_TRIES: Final = 5


def load_etcd3() -> Any:
    """The module `etcd3`, whatever protobuf is installed. Idempotent, thread-safe.

    Raises ImportError when the package is missing or its generated modules carry no descriptor.
    """
    with _lock:
        if "etcd3" in sys.modules:
            return sys.modules["etcd3"]
        folder = _generated_folder()
        added = [name for name in _MODULES if _install(f"{_PACKAGE}.{name}", folder / f"{name}.py")]
        try:
            return importlib.import_module("etcd3")
        except BaseException:
            # The descriptors stay in the pool (it cannot forget), and adding equal bytes again is harmless.
            for name in added:
                sys.modules.pop(f"{_PACKAGE}.{name}", None)
            raise


def _parsed(source: str) -> ast.Module:
    """`ast.parse`, again if the interpreter stumbled.

    CPython 3.11 keeps one depth counter for all threads: parsing in another one meanwhile is a SystemError.
    """
    for _ in range(PARSE_TRIES - 1):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)


def serialized_descriptor(source: str) -> bytes | None:
    """The FileDescriptorProto that a generated module's `source` carries as a literal; None if there is none.

    Known forms: `FileDescriptor(..., serialized_pb=_b('...'))` (text to be encoded as latin-1),
    `serialized_pb=b'...'`, and `AddSerializedFile(b'...')`.
    """
    for node in ast.walk(_parsed(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else None
        if name == "FileDescriptor":
            literal = next((word.value for word in node.keywords if word.arg == "serialized_pb"), None)
        elif name == "AddSerializedFile":
            literal = node.args[0] if node.args else None
        else:
            continue
        found = _bytes_of(literal)
        if found is not None:
            return found
    return None


def _bytes_of(literal: ast.expr | None) -> bytes | None:
    if isinstance(literal, ast.Call) and literal.args:
        literal = literal.args[0]
    value = literal.value if isinstance(literal, ast.Constant) else None
    if isinstance(value, str):
        return value.encode("latin-1")
    return value if isinstance(value, bytes) else None


def _generated_folder() -> Path:
    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the package etcd3 is not installed", name="etcd3")
    return Path(next(iter(spec.submodule_search_locations))) / "etcdrpc"


def _install(name: str, path: Path) -> bool:
    """Put a message module built from `path`'s literal into sys.modules; False if one is there already."""
    if name in sys.modules:
        return False
    from google.protobuf import descriptor_pool
    from google.protobuf.internal import builder

    serialized = serialized_descriptor(path.read_text(encoding="utf-8"))
    if serialized is None:
        raise ImportError(f"{path} carries no serialized descriptor", name=name)
    module = ModuleType(name)
    module.__file__ = str(path)
    descriptor = descriptor_pool.Default().AddSerializedFile(serialized)
    names = module.__dict__
    names["DESCRIPTOR"] = descriptor
    builder.BuildMessageAndEnumDescriptors(descriptor, names)
    builder.BuildTopDescriptorsAndMessages(descriptor, name, names)
    sys.modules[name] = module
    return True
