// Owns the slider of a series (series.html) and the button that plays it: they show one training step
// at a time, move the line in the charts, and keep the step in the address. Without the script all
// steps stand side by side.
"use strict";

const slider = document.getElementById("step");
const steps = slider.dataset.steps.trim().split(" ").map(Number);
const shown = document.querySelector(".step-slider output");
const strips = [...document.querySelectorAll(".frames")].map(
  (strip) => new Map([...strip.children].map((frame) => [Number(frame.dataset.step), frame])),
);
const charts = [...document.querySelectorAll(".health")];
let current = null;

function show(place) {
  const step = steps[place];
  for (const frames of strips) {
    const before = frames.get(current);
    if (before) before.hidden = true;
    const frame = frames.get(step);
    if (frame) frame.hidden = false;
    for (const near of [place, place + 1, place - 1]) {
      const image = frames.get(steps[near])?.querySelector("img");
      if (image) image.loading = "eager"; // there when it is wanted
    }
  }
  charts.forEach((chart) => mark(chart, step));
  current = step;
  slider.value = place;
  slider.setAttribute("aria-valuetext", `step ${step}`);
  shown.textContent = step;
  const search = new URLSearchParams(location.search);
  search.set("step", step);
  history.replaceState(null, "", `${location.pathname}?${search}${location.hash}`);
}

function mark(chart, step) {
  const { first, last, left, width } = chart.querySelector("[data-first]").dataset;
  const x = Number(left) + (Number(width) * (step - first)) / Math.max(1, last - first);
  const line = chart.querySelector("[data-now]");
  line.setAttribute("x1", x);
  line.setAttribute("x2", x);
  const row = chart.querySelector(`tr[data-step="${step}"]`);
  for (const count of chart.querySelectorAll("[data-count]")) {
    const cell = row?.querySelector(`[data-finding="${count.dataset.count}"]`);
    count.textContent = cell ? cell.textContent : "–";
  }
}

/** Show one step after the other, until the button is pressed again or the user moves the slider. */
const player = document.querySelector("[data-play]");
let playing = null;

function play(on) {
  clearInterval(playing);
  playing = on ? setInterval(() => show((Number(slider.value) + 1) % steps.length), 700) : null;
  player.textContent = on ? "Pause" : "Play";
}

player.addEventListener("click", () => play(playing === null));
slider.addEventListener("input", () => {
  play(false);
  show(Number(slider.value));
});
for (const frames of strips) for (const frame of frames.values()) frame.hidden = true;
document.querySelector("[data-series]").classList.add("sliding");
document.querySelector(".step-slider").hidden = false;
const asked = steps.indexOf(Number(new URLSearchParams(location.search).get("step") ?? NaN));
show(asked < 0 ? steps.length - 1 : asked);
