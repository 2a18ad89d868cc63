import time

import gradio as gr
from fastapi import FastAPI


def respond(message, history):
    """Send the words of the message in reverse order, one by one."""
    words = message.split()[::-1]
    for count in range(1, len(words) + 1):
        time.sleep(0.05)
        yield " ".join(words[:count])


def count(number):
    """Count the calls of a session, whose state is in the memory of one process."""
    return number + 1, number + 1


with gr.Blocks(title="Chat") as page:
    gr.ChatInterface(respond, api_name="chat")
    state = gr.State(0)
    total = gr.Number(label="Calls of this session")
    gr.Button("Count").click(count, state, [state, total], api_name="count")

app = gr.mount_gradio_app(FastAPI(), page, path="/")
