"""An example as a module, without its recipe being made: that may need packages and data."""

import importlib.util
import sys
from types import ModuleType

from tests.architecture.source import ROOT


def load_example(name: str) -> ModuleType:
    """examples/`name`.py, read anew."""
    spec = importlib.util.spec_from_file_location(f"{name}_example", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
