// The page of an OpenAPI document: Swagger UI, and a form for a token where the document requires one.
"use strict";

const documentUrl = document.body.dataset.document;
const note = document.getElementById("note");
const form = document.getElementById("token-form");
const tokenInput = document.getElementById("token");
let token = "";

async function show() {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const response = await fetch(documentUrl, { headers });
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    note.textContent = body.error || `the document can't be loaded: status ${response.status}`;
    form.hidden = response.status !== 401 && response.status !== 403;
    return;
  }
  note.textContent = "";
  form.hidden = true;
  SwaggerUIBundle({
    url: documentUrl,
    dom_id: "#swagger-ui",
    deepLinking: true,
    displayRequestDuration: true,
    validatorUrl: null,
    requestInterceptor(request) {
      if (request.loadSpec && token) {
        request.headers.authorization = `Bearer ${token}`;
      }
      return request;
    },
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  token = tokenInput.value.trim();
  show();
});
show();
