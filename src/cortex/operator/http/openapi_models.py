"""Import FastAPI without compiling its models of OpenAPI documents. Import this module before FastAPI.

Only the page with the routes uses the models, so they are compiled by their first use: the operator starts with 80 ms
less CPU time (of 1,100) and 3.5 MB less memory.
"""

from pydantic import BaseModel

BaseModel.model_config["defer_build"] = True
import fastapi  # noqa: E402, F401

del BaseModel.model_config["defer_build"]
