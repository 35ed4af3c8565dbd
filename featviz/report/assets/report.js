// What a report does beyond showing pictures, with the grids of tiles.js. Without the scripts every
// picture of the pages is still there, with the numbers of each.
"use strict";

// ---------------------------------------------------------------------------------------------
// What floats above the page: a tip at the pointer, and dialogs.

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

  build() {
    const side = (what, text) => make("figure", {}, what, make("figcaption", {}, text));
    const map = side(this.canvas, "map");
    this.caption = map.lastChild;
    const pair = make("div", { className: "sides" }, map, side(this.input, "input"));
    const nav = make("div", { className: "bar" }, this.previous, this.next);
    Object.assign(this, dialog("viewer", pair, this.facts, nav));
    this.previous.addEventListener("click", () => this.step(-1));
    this.next.addEventListener("click", () => this.step(1));
    this.box.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) this.step(step);
    });
    this.box.addEventListener("close", () => this.frame.group.onchoice?.());
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
    this.channel = group.chosen = channel;
    this.title.textContent = grid.title(channel);
    this.input.src = this.frame.input.src;
    this.input.alt = this.frame.input.alt;
    this.caption.textContent = grid.over ? "map over the input" : "map";
    this.facts.textContent = `${grid.sentence(channel)} · std ${digits(grid.stat(channel, "std"))}`;
    const [height, width] = grid.tile;
    Object.assign(this.canvas, { width: width * grid.slices, height });
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `Channel ${channel} of ${image.alt}`);
    const pen = this.canvas.getContext("2d");
    for (let slice = 0; slice < grid.slices; slice++) {
      const from = grid.place(grid.slots.get(channel) * grid.slices + slice);
      pen.drawImage(image, ...from, slice * width, 0, width, height);
    }
    const place = grid.placeOf(channel);
    this.previous.disabled = place === 0;
    this.next.disabled = place === grid.channels.length - 1;
  },
};

const slider = {
  left: make("select"), right: make("select"),
  under: make("img"), over: make("img", { className: "over" }),
  edge: make("div", { className: "edge" }),
  range: make("input", { type: "range", min: 0, max: 100, value: 50 }),

  build() {
    const stage = make("div", { className: "stage" }, this.under, this.over, this.edge);
    this.range.setAttribute("aria-label", "Where the left picture ends");
    const pick = (text, select) => make("label", {}, text, " ", select);
    const bar = make("div", { className: "bar" }, pick("Left", this.left), this.range, pick("Right", this.right));
    Object.assign(this, dialog("slider", bar, stage));
    this.range.addEventListener("input", () => this.cut());
    for (const select of [this.left, this.right]) select.addEventListener("change", () => this.show());
  },

  open(group) {
    this.group = group;
    this.title.textContent = "Slide between two pictures";
    [this.left, this.right].forEach((select, n) => {
      select.replaceChildren(...group.frames.map((frame, i) =>
        make("option", { value: i, textContent: frame.name })));
      select.value = n;
    });
    this.show();
    this.box.showModal();
  },

  show() {
    [[this.under, this.right], [this.over, this.left]].forEach(([image, select]) => {
      const frame = this.group.frames[select.value];
      Object.assign(image, { src: frame.image.src, alt: frame.image.alt });
      [image.width, image.height] = frame.grid.size;
    });
    this.cut();
  },

  cut() {
    this.edge.style.left = `${this.range.value}%`;
    this.over.style.clipPath = `inset(0 ${100 - this.range.value}% 0 0)`;
  },
};

const KEYS = [
  ["j  k", "next and previous grid"], ["← ↑ → ↓", "from tile to tile, in a grid"],
  ["Enter", "enlarge the tile"], ["[  ]", "previous and next page"], ["/", "filter"],
  ["?", "these keys"],
];
const help = {
  build() {
    const rows = KEYS.map(([keys, what]) =>
      make("div", {}, make("dt", {}, make("kbd", {}, keys)), make("dd", {}, what)));
    Object.assign(this, dialog("help", make("dl", { className: "facts" }, ...rows)));
    this.title.textContent = "Keys";
  },
  open() { this.box.showModal(); },
};

// ---------------------------------------------------------------------------------------------
// The page: controls, keys, and which of several pages is shown.

const frames = new Map(); // by element
const voice = make("div", { className: "unseen" });
voice.setAttribute("aria-live", "polite");
const announce = (text) => { voice.textContent = text; };

const sight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const frame = frames.get(target);
    frame.visible = isIntersecting;
    frame.paint();
  }
}, { rootMargin: "200px" });
const size = new ResizeObserver((entries) => entries.forEach(({ target }) => frames.get(target).paint()));

function filter(input) {
  const scope = input.closest("[data-filtered]") || input.closest(".page");
  const wanted = input.value.toLowerCase().split(/\s+/);
  const items = [...scope.querySelectorAll("[data-item]")];
  for (const item of items) {
    const text = item.dataset.item.toLowerCase();
    item.hidden = !wanted.every((word) => text.includes(word));
  }
  announce(`${items.filter((item) => !item.hidden).length} of ${items.length} shown`);
}

/** Bring a page to life, once: its groups are known from now on. */
function begin(page) {
  if (page.dataset.begun) return;
  page.dataset.begun = "yes";
  page.querySelectorAll(".control").forEach((control) => { control.hidden = false; });
  page.querySelectorAll("[data-same]").forEach((image) => {
    image.src = document.getElementById(image.dataset.same).src;
  });
  const groups = [...page.querySelectorAll("[data-group]")].map((element) => new Group(element));
  const sort = page.querySelector("[data-sort]");
  const outline = page.querySelector("[data-outline]");
  sort?.addEventListener("change", () => groups.forEach((group) => group.sort(sort.value)));
  outline?.addEventListener("change", () => groups.forEach((g) => g.outlineZeros(outline.checked)));
  for (const group of groups) {
    group.onchoice = () => sort.value === "similarity" && group.sort("similarity");
  }
  const field = page.querySelectorAll("[data-filter]");
  field.forEach((input) => input.addEventListener("input", () => filter(input)));
}

/** In a report of one file, show the page that the address names; else the only one. */
function route() {
  const pages = [...document.querySelectorAll(".page")];
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const page = target?.closest?.(".page") || pages.find((p) => !p.hidden) || pages[0];
  pages.forEach((other) => { other.hidden = other !== page; });
  begin(page);
  if (pages.length > 1) (target || page).scrollIntoView();
}

/** Focus the next or the previous grid that is shown. */
function walk(by) {
  const all = [...frames.keys()].filter((element) => element.offsetParent);
  const at = all.indexOf(document.activeElement);
  const next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : at + by];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

function keys(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const page = document.querySelector(".page:not([hidden])");
  const actions = {
    j: () => walk(1), k: () => walk(-1), "?": () => help.open(),
    "/": () => page.querySelector("[data-filter]")?.focus(),
    "[": () => page.querySelector("[rel=prev]")?.click(),
    "]": () => page.querySelector("[rel=next]")?.click(),
  };
  if (!(event.key in actions)) return;
  event.preventDefault();
  actions[event.key]();
}

for (const one of [viewer, slider, help]) {
  one.build();
  document.body.append(one.box);
}
document.body.append(tip.box, voice);
const keysButton = document.querySelector("[data-help]");
keysButton.hidden = false;
keysButton.addEventListener("click", () => help.open());
document.addEventListener("keydown", keys);
addEventListener("hashchange", route);
route();
