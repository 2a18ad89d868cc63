"""An OpenAI-compatible chat API: one loaded model, two routes."""

import contextlib
import json
import time
import uuid
from typing import Annotated

from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse
from transformer import Transformer

import cortex
from engine import Engine, Sequence

NonEmptyText = Annotated[str, Field(min_length=1)]


class TextPart(BaseModel):
    type: str
    text: str = ""


class Message(BaseModel):
    role: str
    content: str | list[TextPart] | None = None

    @property
    def text(self):
        """Return the content as one text."""
        return "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """The fields of OpenAI's API that this example has, which may be null; others are ignored."""

    model: str
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    seed: int | None = Field(None, ge=0)
    stop: NonEmptyText | Annotated[list[NonEmptyText], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Handler:
    def __init__(self, config):
        self.name = config["model"]
        self.created = int(time.time())
        self.engine = Engine(Transformer(config["max_sequences"], config["context_tokens"]))

    @cortex.route("GET", "/v1/models")
    async def models(self):
        """List the models."""
        return {"object": "list", "data": [self._model()]}

    @cortex.route("GET", "/v1/models/{name}")
    async def model(self, name):
        """Describe a model."""
        self._check_model(name)
        return self._model()

    @cortex.route("POST", "/v1/chat/completions")
    async def chat(self, payload: ChatRequest):
        """Answer a conversation."""
        sequence = self._sequence(payload)
        if payload.stream:
            return StreamingResponse(self._events(payload, sequence), media_type="text/event-stream")
        async with contextlib.aclosing(self.engine.answer(sequence)) as texts:
            content = "".join([text async for text in texts])
        return {
            **_head("chat.completion", self.name),
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": content, "refusal": None},
                    "finish_reason": sequence.finish_reason,
                    "logprobs": None,
                }
            ],
            "usage": _usage(sequence),
        }

    def _model(self):
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "cortex"}

    def _check_model(self, name):
        if name != self.name:
            detail = {"message": f"the model {name!r} does not exist", "param": "model", "code": "model_not_found"}
            raise HTTPException(404, detail)

    def _sequence(self, payload):
        """Return the sequence of a request, or refuse it: once a stream has begun, its status is sent."""
        self._check_model(payload.model)
        prompt = "".join(f"{message.role}: {message.text}\n" for message in payload.messages) + "assistant: "
        room = self.engine.model.max_tokens - len(prompt)
        wanted = payload.max_completion_tokens or payload.max_tokens or max(room, 1)
        if wanted > room:
            limit = self.engine.model.max_tokens
            message = f"the model reads and writes at most {limit} tokens, but {len(prompt)} + {wanted} are needed"
            raise HTTPException(400, {"message": message, "param": "messages", "code": "context_length_exceeded"})
        stops = [payload.stop] if isinstance(payload.stop, str) else payload.stop or []
        temperature = 1.0 if payload.temperature is None else payload.temperature
        return Sequence(prompt, wanted, temperature, payload.seed, stops)

    async def _events(self, payload, sequence):
        """Yield the answer as server-sent events."""
        head = _head("chat.completion.chunk", self.name)
        with_usage = payload.stream_options is not None and payload.stream_options.include_usage

        def event(choices, usage=None):
            chunk = {**head, "choices": choices, **({"usage": usage} if with_usage else {})}
            return f"data: {json.dumps(chunk)}\n\n"

        def choice(delta, finish_reason=None):
            return [{"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}]

        yield event(choice({"role": "assistant", "content": ""}))
        try:
            async with contextlib.aclosing(self.engine.answer(sequence)) as texts:
                async for text in texts:
                    yield event(choice({"content": text}))
        except Exception as error:  # the status is sent already: clients read this event as an error
            failed = {"message": type(error).__name__, "type": "server_error", "param": None, "code": None}
            yield f"data: {json.dumps({'error': failed})}\n\n"
            raise
        yield event(choice({}, sequence.finish_reason))
        if with_usage:
            yield event([], _usage(sequence))
        yield "data: [DONE]\n\n"


def _head(kind, model):
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _usage(sequence):
    prompt, completion = sequence.prompt_tokens, sequence.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
