// Owns what floats above a page:
//
//   tip      the numbers of the channel under the pointer or the keyboard's cursor
//   viewer   a tile, enlarged, with the input; in a comparison with the same tile of the other run
//   help     the list of keys
"use strict";

const tip = {
  box: make("div", { className: "tip", hidden: true, role: "tooltip" }),

  /** Show a channel's numbers below a point of the window, or above it where there is no room.
      @param channel null hides them */
  show({ grid }, channel, x, y) {
    this.box.hidden = channel === null;
    if (channel === null) return;
    const title = grid.title(channel).replace("C", "c");
    this.box.replaceChildren(make("b", {}, title), grid.sentence(channel));
    this.box.style.left = "0px"; // where it stood last, the edge may have squeezed it
    const { offsetWidth: width, offsetHeight: height } = this.box;
    const room = document.documentElement.clientWidth; // without the scroll bar
    const left = Math.max(4, Math.min(x + 14, room - width - 8));
    const hasRoom = y + 18 + height <= innerHeight;
    const top = hasRoom ? y + 18 : Math.max(4, y - height - 12);
    this.box.style.left = `${left}px`;
    this.box.style.top = `${top}px`;
  },

  hide() { this.box.hidden = true; },
};

/** A dialog with a title and a close button; the browser keeps the focus inside it. */
function dialog(name, ...children) {
  const title = make("h2", { id: `${name}-title` });
  const closing = make("button", { type: "button", className: "close", textContent: "Close" });
  const box = make("dialog", { className: name }, make("header", {}, title, closing), ...children);
  box.setAttribute("aria-labelledby", title.id);
  closing.addEventListener("click", () => box.close());
  box.addEventListener("click", (event) => event.target === box && box.close());
  return { box, title };
}

const viewer = {
  frame: null, // whose tile is shown
  channel: null,
  canvas: make("canvas"),
  caption: make("figcaption"),
  input: make("img"),
  where: make("p", { className: "where" }),
  others: make("div", { className: "excited" }), // the same tile of the other runs of a comparison
  facts: make("p", { className: "numbers", ariaLive: "polite" }),
  previous: make("button", { type: "button", textContent: "← Previous" }),
  next: make("button", { type: "button", textContent: "Next →" }),
  all: make("a", { textContent: "This channel in all images" }),

  build() {
    const map = make("figure", {}, this.canvas, this.caption);
    const input = make("figure", {}, this.input, make("figcaption", {}, "input"));
    const pair = make("div", { className: "sides" }, map, input);
    const nav = make("div", { className: "bar" }, this.previous, this.next, this.all);
    Object.assign(this, dialog("viewer", this.where, pair, this.others, this.facts, nav));
    this.canvas.setAttribute("role", "img");
    this.all.addEventListener("click", () => this.box.close());
    this.previous.addEventListener("click", () => this.step(-1));
    this.next.addEventListener("click", () => this.step(1));
    this.box.addEventListener("keydown", (event) => this.key(event));
  },

  key(event) {
    const row = Math.max(1, Math.floor(this.frame.view.nrow / this.frame.grid.slices));
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.step(steps[event.key]);
  },

  open(frame, channel) {
    this.frame = frame;
    tip.hide();
    this.show(channel);
    this.box.showModal();
  },

  /** Show the channel that is so many positions behind this one, if there is one. */
  step(positions) {
    const { grid } = this.frame;
    const channel = grid.channelOf(grid.positionOf(this.channel) + positions);
    if (channel !== null) this.show(channel);
  },

  show(channel) {
    const { grid, group, input } = this.frame;
    this.channel = channel;
    this.frame.last = channel;
    const { layer, spot } = group.element.dataset;
    const position = grid.positionOf(channel);
    this.title.textContent = grid.title(channel);
    this.where.textContent = `${layer} · ${this.frame.name}`;
    this.input.src = input.src;
    this.input.alt = input.alt;
    this.caption.textContent = grid.over ? "map over the input" : "map";
    this.facts.textContent = `${grid.title(channel)}: ${grid.sentence(channel)} · std ${digits(grid.stat(channel, "std"))}`;
    this.previous.disabled = position === 0;
    this.next.disabled = position === grid.count - 1;
    // a comparison has no pages of channels, but the other runs
    this.all.hidden = !spot;
    if (spot) this.all.href = channelAddress(spot, channel);
    this.others.replaceChildren(...(spot ? [] : this.otherFigures(channel)));
    this.paint();
  },

  otherFigures(channel) {
    const others = this.frame.group.frames.filter((other) => other !== this.frame && other.grid.slots.has(channel));
    return others.map((other) => make("figure", {},
      crop(other, channel, 192, `Channel ${channel}, ${other.name}`), make("figcaption", {}, other.name)));
  },

  /** Draw the channel's tiles side by side, as large as they are in the picture. */
  paint() {
    const { grid, image } = this.frame;
    const [height, width] = grid.tile;
    this.canvas.classList.toggle("grey", Boolean(grid.grey));
    this.canvas.width = width * grid.slices;
    this.canvas.height = height;
    this.canvas.setAttribute("aria-label", `Channel ${this.channel} of ${image.alt}`);
    if (!image.complete) { // out of sight until now
      image.loading = "eager";
      image.addEventListener("load", () => this.paint(), { once: true });
      return;
    }
    const pen = this.canvas.getContext("2d");
    pen.imageSmoothingEnabled = false;
    for (let slice = 0; slice < grid.slices; slice++) {
      const source = grid.box(grid.slots.get(this.channel) * grid.slices + slice);
      pen.drawImage(image, ...source, slice * width, 0, width, height);
    }
  },
};

const PLACES_KEY = { keys: "p", meaning: "ask a place, or stop asking" };
const KEYS = [
  { keys: "j  k", meaning: "next and previous grid" },
  { keys: "← ↑ → ↓", meaning: "from tile to tile, in a grid" },
  { keys: "Enter", meaning: "enlarge the tile" },
  { keys: "←  →", meaning: "previous and next channel, if one is open" },
  { keys: "Escape", meaning: "close" },
  { keys: "[  ]", meaning: "previous and next page" },
  { keys: "/", meaning: "search" },
  { keys: "?", meaning: "these keys" },
];
const help = {
  build() {
    const hasPlaces = document.querySelector("[data-places]") !== null;
    const shown = hasPlaces ? [PLACES_KEY, ...KEYS] : KEYS;
    const rows = shown.map(({ keys, meaning }) =>
      make("div", {}, make("dt", {}, make("kbd", {}, keys)), make("dd", {}, meaning)));
    Object.assign(this, dialog("help", make("dl", { className: "facts" }, ...rows)));
    this.title.textContent = "Keys";
  },

  open() { this.box.showModal(); },
};
