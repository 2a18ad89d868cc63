// Keeps the regions marked `data-live` up to date, shows the values of charts, asks before changes, scrolls logs.
"use strict";
(() => {
  const state = document.getElementById("live-state");
  const regions = () => [...document.querySelectorAll("[data-live][id]")];
  const seconds = Math.min(...regions().map((region) => Number(region.dataset.live) || 5));
  let failures = 0;

  function announce(text) {
    if (!state || state.textContent === text) return;
    state.textContent = text;
    state.hidden = !text;
  }

  function isAtBottom(log) {
    return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  }

  function scrollLogs() {
    for (const log of document.querySelectorAll("[data-bottom]")) log.scrollTop = log.scrollHeight;
  }

  // Replaces what has changed, and keeps the focus, the selection, open details and the place in a log.
  function replace(old, fresh) {
    if (old.innerHTML === fresh.innerHTML) return;
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    if (focused && focused.matches("input, select")) return;
    const selection = document.getSelection();
    if (selection && !selection.isCollapsed && old.contains(selection.anchorNode)) return;
    const controls = "a[href], button, summary, [tabindex]";
    const place = focused ? [...old.querySelectorAll(controls)].indexOf(focused) : -1;
    const open = [...old.querySelectorAll("details")].map((details) => details.open);
    const log = old.querySelector("[data-bottom]");
    const top = log && !isAtBottom(log) ? log.scrollTop : null;
    old.replaceChildren(...document.importNode(fresh, true).childNodes);
    [...old.querySelectorAll("details")].forEach((details, index) => {
      if (index in open) details.open = open[index];
    });
    const next = old.querySelector("[data-bottom]");
    if (next) next.scrollTop = top === null ? next.scrollHeight : top;
    const target = place >= 0 ? old.querySelectorAll(controls)[place] : null;
    if (target) target.focus({ preventScroll: true });
  }

  async function update() {
    const response = await fetch(location.href, { headers: { "x-live": "1" }, redirect: "error", cache: "no-store" });
    if (response.status === 401) return false;
    if (!response.ok) throw new Error(String(response.status));
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    for (const region of regions()) {
      const fresh = page.getElementById(region.id);
      if (fresh) replace(region, fresh);
    }
    return true;
  }

  async function poll() {
    if (!document.hidden) {
      try {
        if (!(await update())) {
          announce("Signed out. Run `cortex dashboard`.");
          return;
        }
        failures = 0;
        announce("");
      } catch {
        failures += 1;
        if (failures > 1) announce("No connection to the operator. Retrying.");
      }
    }
    setTimeout(poll, seconds * 1000 * Math.min(failures + 1, 6));
  }

  // Shows the values of a chart under the pointer. The lines themselves are the data.
  const points = new WeakMap();

  function pointsOf(path) {
    if (!points.has(path)) {
      const pairs = path.getAttribute("d").slice(1).split("L");
      points.set(path, pairs.map((pair) => pair.split(" ").map(Number)));
    }
    return points.get(path);
  }

  function format(value, unit) {
    if (unit === "s") return value < 1 ? `${(value * 1000).toPrecision(3)} ms` : `${value.toPrecision(3)} s`;
    return `${Number(value.toPrecision(3))}${unit}`;
  }

  function inspect(plot, clientX) {
    const svg = plot.querySelector("svg.chart");
    const { width, height } = svg.viewBox.baseVal;
    const box = svg.getBoundingClientRect();
    const part = Math.min(Math.max((clientX - box.left) / box.width, 0), 1);
    const near = [...svg.querySelectorAll(".line")].flatMap((path) =>
      pointsOf(path).map(([x, y]) => ({ path, x, y, gap: Math.abs(x - part * width) })));
    const values = new Map();
    for (const point of near) {
      const name = point.path.dataset.name;
      if (point.gap < width / 60 && !(values.get(name)?.gap <= point.gap)) values.set(name, point);
    }
    let tip = plot.querySelector(".tip");
    if (!values.size) return tip?.remove();
    if (!tip) {
      tip = document.createElement("div");
      tip.className = "tip";
      tip.setAttribute("aria-hidden", "true");
      plot.append(tip);
    }
    const x = [...values.values()][0].x / width;
    const ago = Math.round((1 - x) * Number(plot.dataset.seconds));
    const at = new Date(Date.now() - ago * 1000).toLocaleTimeString();
    const texts = [...values].map(([name, { y }]) =>
      `${name} ${format(((height - y) / (height - 1)) * Number(plot.dataset.top), plot.dataset.unit)}`);
    tip.textContent = [at, ...texts].join("\n");
    tip.style.left = `${x * 100}%`;
    tip.classList.toggle("left", x > 0.6);
  }

  document.addEventListener("pointermove", (event) => {
    const plot = event.target.closest?.(".plot");
    for (const tip of document.querySelectorAll(".tip")) if (tip.parentElement !== plot) tip.remove();
    if (plot) inspect(plot, event.clientX);
  });

  document.addEventListener("submit", (event) => {
    const question = event.target.dataset.confirm;
    if (question && !window.confirm(question)) event.preventDefault();
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && Number.isFinite(seconds)) update().catch(() => {});
  });
  scrollLogs();
  for (const current of document.querySelectorAll(".tabs [aria-current], .sections [aria-current]")) {
    current.parentElement.scrollLeft = current.offsetLeft - current.parentElement.offsetLeft - 24;
  }
  if (Number.isFinite(seconds)) setTimeout(poll, seconds * 1000);
})();
