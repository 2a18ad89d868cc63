import asyncio
import contextlib
from pathlib import Path

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import RedirectResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel


class Text(BaseModel):
    text: str


@contextlib.asynccontextmanager
async def lifespan(app):
    yield {"model": str.title}  # load the model here: once per process, before it is ready


app = FastAPI(title="FastAPI behind cortex", lifespan=lifespan)


@app.get("/", include_in_schema=False)
def page(request: Request):
    return RedirectResponse(request.url_for("static", path="index.html"))


@app.post("/predict")
def predict(body: Text, request: Request) -> Text:
    """Write each word with a capital letter."""
    return Text(text=request.state.model(body.text))


@app.get("/events")
async def events(count: int = 5):
    """Send numbers as server-sent events."""

    async def numbers():
        for number in range(count):
            yield f"data: {number}\n\n"
            await asyncio.sleep(0.1)

    return StreamingResponse(numbers(), media_type="text/event-stream")


@app.websocket("/echo")
async def echo(socket: WebSocket):
    await socket.accept()
    async for text in socket.iter_text():
        await socket.send_text(text)


admin = FastAPI(title="A sub-application")


@admin.get("/settings")
def settings(request: Request):
    return {"this": str(request.url), "docs": str(request.base_url) + "docs"}


app.mount("/admin", admin)
app.mount("/static", StaticFiles(directory=Path(__file__).parent / "static"), name="static")
