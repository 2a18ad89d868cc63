"""Import the operator's modules with less CPU time and memory. Import this module before FastAPI and all of cortex.

- Imports allocate many objects that stay, so the garbage collector would search them again and again, for an eighth of
  the CPU time of all imports. It is off until `resume_garbage_collection`.
- FastAPI compiles its models of OpenAPI documents, which only the page with the routes uses, by their first use. That
  saves 80 ms of CPU time (of 1,100) and 3.5 MB of memory.
- FastAPI imports `pydantic.v1` to refuse models of it, unless that can't be imported: 25 ms and 2.2 MB.
"""

import gc
import sys

gc.disable()

from pydantic import BaseModel  # noqa: E402

BaseModel.model_config["defer_build"] = True
import fastapi  # noqa: E402, F401

del BaseModel.model_config["defer_build"]
sys.modules.setdefault("pydantic.v1", None)  # type: ignore[arg-type] # importing it now fails


def resume_garbage_collection() -> None:
    """Let the garbage collector search new objects, but not those of imports. Call it once all are imported."""
    gc.freeze()
    gc.enable()
