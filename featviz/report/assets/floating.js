// Owns what floats above a page:
//
//   tip      the numbers of the channel under the pointer or the keyboard's cursor
//   viewer   a tile, enlarged, with the input; in a comparison with the same tile of the other run
//   help     the list of keys
"use strict";

const tip = {
  box: make("div", { className: "tip", hidden: true, role: "tooltip" }),
  show(frame, channel, x, y) {
    this.box.hidden = channel === null;
    if (channel === null) return;
    this.box.replaceChildren(make("b", {}, frame.grid.title(channel).replace("C", "c")), frame.grid.sentence(channel));
    const { offsetWidth: width, offsetHeight: height } = this.box;
    this.box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
    this.box.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 12) : y + 18}px`;
  },
  hide() { this.box.hidden = true; },
};

/** A dialog with a title and a close button; the browser keeps the focus inside it. */
function dialog(name, ...children) {
  const title = make("h2", { id: `${name}-title` });
  const close = make("button", { type: "button", className: "close", textContent: "Close" });
  const box = make("dialog", { className: name }, make("header", {}, title, close), ...children);
  box.setAttribute("aria-labelledby", title.id);
  close.addEventListener("click", () => box.close());
  box.addEventListener("click", (event) => event.target === box && box.close());
  return { box, title };
}

const viewer = {
  canvas: make("canvas"), input: make("img"), facts: make("p", { className: "numbers" }),
  previous: make("button", { type: "button", textContent: "← Previous" }),
  next: make("button", { type: "button", textContent: "Next →" }),

  where: make("p", { className: "where" }), all: make("a", { textContent: "This channel in all images" }),

  build() {
    const side = (what, text) => make("figure", {}, what, make("figcaption", {}, text));
    const map = side(this.canvas, "map");
    this.caption = map.lastChild;
    const pair = make("div", { className: "sides" }, map, side(this.input, "input"));
    this.beside = make("div", { className: "excited" });
    const nav = make("div", { className: "bar" }, this.previous, this.next, this.all);
    this.facts.setAttribute("aria-live", "polite");
    Object.assign(this, dialog("viewer", this.where, pair, this.beside, this.facts, nav));
    this.all.addEventListener("click", () => this.box.close());
    this.previous.addEventListener("click", () => this.step(-1));
    this.next.addEventListener("click", () => this.step(1));
    this.box.addEventListener("keydown", (event) => {
      const row = Math.max(1, Math.floor(this.frame.view.nrow / this.frame.grid.slices));
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row }[event.key];
      if (!step) return;
      event.preventDefault();
      this.step(step);
    });
  },

  open(frame, channel) {
    this.frame = frame;
    tip.hide();
    this.show(channel);
    this.box.showModal();
  },

  step(by) {
    const { grid } = this.frame;
    const channel = grid.channelOf(grid.placeOf(this.channel) + by);
    if (channel !== null) this.show(channel);
  },

  show(channel) {
    const { grid, image, group } = this.frame;
    this.channel = this.frame.last = channel;
    this.title.textContent = grid.title(channel);
    const { layer, spot } = group.element.dataset;
    this.where.textContent = `${layer} · ${this.frame.name}`;
    this.all.hidden = !spot; // a comparison has no pages of channels
    if (spot) this.all.href = spot.replace(/0$/, channel);
    const others = spot ? [] : group.frames.filter((other) => other !== this.frame && other.grid.slots.has(channel));
    this.beside.replaceChildren(...others.map((other) => make("figure", {},
      crop(other, channel, 192, `Channel ${channel}, ${other.name}`), make("figcaption", {}, other.name))));
    this.input.src = this.frame.input.src;
    this.input.alt = this.frame.input.alt;
    this.caption.textContent = grid.over ? "map over the input" : "map";
    this.facts.textContent = `${grid.title(channel)}: ${grid.sentence(channel)} · std ${digits(grid.stat(channel, "std"))}`;
    const [height, width] = grid.tile;
    this.canvas.classList.toggle("grey", Boolean(grid.grey));
    Object.assign(this.canvas, { width: width * grid.slices, height });
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `Channel ${channel} of ${image.alt}`);
    if (!image.complete) { // out of sight until now
      image.loading = "eager";
      image.addEventListener("load", () => this.show(this.channel), { once: true });
    }
    const pen = this.canvas.getContext("2d");
    pen.imageSmoothingEnabled = false;
    for (let slice = 0; slice < grid.slices; slice++) {
      const from = grid.place(grid.slots.get(channel) * grid.slices + slice);
      pen.drawImage(image, ...from, slice * width, 0, width, height);
    }
    const place = grid.placeOf(channel);
    this.previous.disabled = place === 0;
    this.next.disabled = place === grid.count - 1;
  },
};

const KEYS = [
  ["j  k", "next and previous grid"], ["← ↑ → ↓", "from tile to tile, in a grid"],
  ["Enter", "enlarge the tile"], ["←  →", "previous and next channel, if one is open"],
  ["p", "ask a place, or stop asking"], ["Escape", "close"], ["[  ]", "previous and next page"], ["/", "search"],
  ["?", "these keys"],
];
const help = {
  build() {
    const hasPlaces = Boolean(document.querySelector("[data-places]"));
    const rows = KEYS.filter(([key]) => key !== "p" || hasPlaces).map(([keys, what]) =>
      make("div", {}, make("dt", {}, make("kbd", {}, keys)), make("dd", {}, what)));
    Object.assign(this, dialog("help", make("dl", { className: "facts" }, ...rows)));
    this.title.textContent = "Keys";
  },
  open() { this.box.showModal(); },
};
