// Addresses are relative to this page, so the endpoint may be any path.
const events = new EventSource("../events");
events.onmessage = (event) => (document.getElementById("events").textContent += event.data + " ");
events.onerror = () => events.close();

const address = new URL("../echo", location.href);
address.protocol = address.protocol.replace("http", "ws");
const socket = new WebSocket(address);
socket.onopen = () => socket.send("hello");
socket.onmessage = (event) => (document.getElementById("echo").textContent = event.data);
