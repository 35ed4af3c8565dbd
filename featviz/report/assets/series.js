// Owns the slider of a series (series.html) and the button that plays it: they show one training step
// at a time, move the line in the charts, and keep the step in the address. The tiles of the step fill
// the width, with the numbers of their channels (tiles.js). Without the scripts all steps stand side by
// side, as they were drawn.
"use strict";

const PLAYED_EVERY = 700; // milliseconds
const slider = document.getElementById("step");
const player = document.querySelector("[data-play]");
const stepNumber = document.querySelector(".step-slider output");
const charts = document.querySelectorAll(".health");
const steps = slider.dataset.steps.trim().split(" ").map(Number); // by position of the slider
/** Of each layer the figures by their step; it may lack some. */
const strips = [...document.querySelectorAll(".frames")].map(
  (strip) => new Map([...strip.children].map((figure) => [Number(figure.dataset.step), figure])),
);
const frames = new Map([...document.querySelectorAll("[data-tiles]")].map(
  (element) => [element, new Tiles(element, JSON.parse(element.dataset.tiles))],
));
let current = null; // the step that is shown
let playing = null; // the timer while the series plays

/** Show the step at a position of the slider. */
function show(position) {
  const step = steps[position];
  for (const figures of strips) {
    if (figures.has(current)) figures.get(current).hidden = true;
    if (figures.has(step)) figures.get(step).hidden = false;
    // the neighbours are loaded before they are shown
    for (const near of [position, position + 1, position - 1]) {
      const image = figures.get(steps[near])?.querySelector("img");
      if (image) image.loading = "eager";
    }
  }
  for (const chart of charts) mark(chart, step);
  current = step;
  slider.value = position;
  slider.setAttribute("aria-valuetext", `step ${step}`);
  stepNumber.textContent = step;
  const search = new URLSearchParams(location.search);
  search.set("step", step);
  history.replaceState(null, "", `${location.pathname}?${search}${location.hash}`);
}

/** Lay out the tiles of a picture for the width that it has, and draw them. */
function paint(tiles) {
  const { element, image, grid } = tiles;
  const room = element.closest(".frames").clientWidth;
  const isReady = room > 0 && image.complete && image.naturalWidth > 0 && grid.channels.length > 0;
  const view = isReady ? grid.laidOut(room, grid.channelsPerRow(room)) : grid;
  const isLaidOut = view.caption > 0; // there is room for numbers
  tiles.show(isLaidOut ? view : grid);
  element.classList.toggle("redrawn", isLaidOut);
  tiles.canvas("tiles", isLaidOut, (pen) => tiles.paintTiles(pen));
  tiles.canvas("names", isLaidOut, (pen) => tiles.paintNames(pen));
}

/** Move the line of a chart to a step, and show its counts of findings. */
function mark(chart, step) {
  const { first, last, left, width } = chart.querySelector("[data-first]").dataset;
  const share = (step - first) / Math.max(1, last - first);
  const x = Number(left) + Number(width) * share;
  const line = chart.querySelector("[data-now]");
  line.setAttribute("x1", x);
  line.setAttribute("x2", x);
  const row = chart.querySelector(`tr[data-step="${step}"]`);
  for (const count of chart.querySelectorAll("[data-count]")) {
    const cell = row?.querySelector(`[data-finding="${count.dataset.count}"]`);
    count.textContent = cell?.textContent ?? "–";
  }
}

/** Show one step after the other, until the button is pressed again or the user moves the slider. */
function play(isOn) {
  clearInterval(playing);
  const showNext = () => show((Number(slider.value) + 1) % steps.length);
  playing = isOn ? setInterval(showNext, PLAYED_EVERY) : null;
  player.textContent = isOn ? "Pause" : "Play";
}

player.addEventListener("click", () => play(playing === null));
slider.addEventListener("input", () => {
  play(false);
  show(Number(slider.value));
});
for (const figures of strips) {
  for (const figure of figures.values()) figure.hidden = true;
}
// also when a step comes out of hiding
const size = new ResizeObserver((entries) => entries.forEach(({ target }) => paint(frames.get(target))));
for (const [element, tiles] of frames) {
  tiles.image.addEventListener("load", () => paint(tiles));
  size.observe(element);
}
document.querySelector("[data-series]").classList.add("sliding");
document.querySelector(".step-slider").hidden = false;
const asked = new URLSearchParams(location.search).get("step");
const position = asked === null ? -1 : steps.indexOf(Number(asked));
show(position < 0 ? steps.length - 1 : position);
