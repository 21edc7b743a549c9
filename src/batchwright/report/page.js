"use strict";
(() => {
  const page = document.documentElement;
  const percent = (value) => `${+value.toFixed(4)}%`;

  const rectangles = new Map();
  for (const rect of document.querySelectorAll("rect[data-s]")) {
    rectangles.set(rect, {
      time: [parseFloat(rect.getAttribute("x")), parseFloat(rect.getAttribute("width"))],
      steps: rect.dataset.s.split(" ").map(Number),
      plate: rect.closest(".plate").dataset,
    });
  }

  function show(axis) {
    page.dataset.axis = axis;
    for (const [rect, { time, steps, plate }] of rectangles) {
      const [x, width] = axis === "steps" ? steps.map((step) => (100 * step) / plate.steps)
        : axis === "own" ? time.map((part) => part / plate.own)
        : time;
      rect.setAttribute("x", percent(x));
      rect.setAttribute("width", percent(width));
    }
    for (const strip of document.querySelectorAll(".strip")) {
      const [, , , height] = strip.getAttribute("viewBox").split(" ");
      const width = axis === "own" ? 1000 * strip.closest(".plate").dataset.own : 1000;
      strip.setAttribute("viewBox", `0 0 ${width} ${height}`);
    }
    for (const button of document.querySelectorAll(".axis-choice button")) {
      button.setAttribute("aria-pressed", String(button.value === axis));
    }
  }

  for (const choice of document.querySelectorAll(".axis-choice")) {
    choice.hidden = false;
    choice.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) show(button.value);
    });
  }

  // Paper can't switch, so it gets the axis on which runs compare.
  let before = "common";
  window.addEventListener("beforeprint", () => { before = page.dataset.axis; show("common"); });
  window.addEventListener("afterprint", () => show(before));

  // A finger can't hover: a tapped row's words appear at the foot of the screen.
  const words = document.createElement("output");
  words.className = "words";
  words.hidden = true;
  document.body.append(words);
  let picked = null;
  document.addEventListener("click", (event) => {
    picked?.classList.remove("picked");
    picked = event.target.closest?.(".grid > g, .dot") ?? null;
    picked?.classList.add("picked");
    words.textContent = picked?.querySelector("title")?.textContent ?? "";
    words.hidden = !picked;
  });
})();
