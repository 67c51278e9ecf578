// Timelines: choose a step, zoom, and read what is under the pointer. Without this script the
// first step is still there, and every span has its native title.
(() => {
  const box = document.querySelector(".timelines");
  if (!box) return;
  const told = box.querySelector(".told");
  const views = [...box.querySelectorAll("[data-view]")];
  const STEPS = [1, 2, 5, 10];

  function words(seconds) {
    if (seconds === 0) return "0 s";
    if (seconds >= 1) return +seconds.toFixed(3) + " s";
    if (seconds >= 1e-3) return +(seconds * 1e3).toFixed(2) + " ms";
    return Math.round(seconds * 1e6) + " \u00b5s";
  }

  function drawTicks(svg) {
    const total = Number(svg.dataset.seconds), group = svg.querySelector(".ticks");
    const raw = total / Math.max(svg.clientWidth / 110, 1);
    const scale = 10 ** Math.floor(Math.log10(raw));
    const step = scale * STEPS.find((part) => scale * part >= raw);
    group.replaceChildren();
    for (let at = 0; at < total * 0.97; at += step) {
      const text = document.createElementNS(svg.namespaceURI, "text");
      text.setAttribute("x", (100 * at) / total + "%");
      text.setAttribute("y", "11");
      text.textContent = words(at);
      group.append(text);
    }
  }

  function zoom(view, factor, around) {
    const scroll = view.querySelector(".scroll"), svg = view.querySelector("svg");
    const old = Number(view.dataset.zoom || 1), now = Math.min(Math.max(old * factor, 1), 256);
    const at = around === undefined ? scroll.clientWidth / 2 : around;
    const share = (scroll.scrollLeft + at) / svg.clientWidth;
    view.dataset.zoom = now;
    svg.style.width = 100 * now + "%";
    scroll.scrollLeft = share * svg.clientWidth - at;
    drawTicks(svg);
  }

  for (const title of box.querySelectorAll("rect > title")) {
    title.parentNode.dataset.told = title.textContent;
    title.remove();
  }
  function show(event) {
    const text = event.target.dataset && event.target.dataset.told;
    told.hidden = !text;
    if (!text) return;
    told.textContent = text;
    const wide = document.documentElement.clientWidth;
    told.style.left = Math.max(Math.min(event.clientX + 12, wide - told.offsetWidth - 8), 4) + "px";
    told.style.top = event.clientY + 16 + "px";
  }
  box.addEventListener("pointermove", show);
  box.addEventListener("pointerdown", show);
  box.addEventListener("pointerleave", () => { told.hidden = true; });

  for (const button of box.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => {
      for (const other of box.querySelectorAll("[data-step]")) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      for (const view of views) view.hidden = view.dataset.view !== button.dataset.step;
      drawTicks(views[button.dataset.step].querySelector("svg"));
    });
  }
  for (const button of box.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => {
      zoom(views.find((view) => !view.hidden), Number(button.dataset.zoom));
    });
  }
  for (const view of views) {
    const scroll = view.querySelector(".scroll");
    scroll.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(view, event.deltaY < 0 ? 1.25 : 0.8, event.clientX - scroll.getBoundingClientRect().left);
    }, { passive: false });
    scroll.addEventListener("keydown", (event) => {
      if (event.key === "+" || event.key === "-") zoom(view, event.key === "+" ? 2 : 0.5);
    });
  }
  const redraw = () => drawTicks(views.find((view) => !view.hidden).querySelector("svg"));
  addEventListener("resize", redraw);
  redraw();
})();
