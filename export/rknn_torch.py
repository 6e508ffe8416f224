"""Stands in for torch in the toolkit's environment (rknn_env.py), where it is the package `torch`.

The toolkit imports torch and derives classes from it when it is loaded, and does without it when it
compiles an ONNX file. The real one would be most of the environment's size.
"""

import sys
import types
from typing import Any

__version__ = "2.4.0"


class Anything:
    """What any name of torch stands for: a value, a function, or a decorator."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        decorated = len(arguments) == 1 and callable(arguments[0])
        return arguments[0] if decorated else self

    def __getattr__(self, name: str) -> Any:
        return _attribute(name)


def _attribute(name: str) -> Any:
    if name.startswith("__"):  # those that Python itself looks for
        raise AttributeError(name)
    return Anything()


for _name in ("nn", "nn.functional", "utils", "utils.data", "autograd", "optim"):
    _module = types.ModuleType(f"{__name__}.{_name}")
    _module.__path__ = []
    _module.__dict__["__getattr__"] = _attribute
    for _base in ("Module", "Dataset", "Function"):
        setattr(_module, _base, type(_base, (), {}))
    sys.modules[_module.__name__] = _module
    _parent, _, _last = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _last, _module)

__getattr__ = _attribute
