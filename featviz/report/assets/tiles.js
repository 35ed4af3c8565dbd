// Grids of feature maps: where tiles are, what is known of their channels, marks and sorting.
// The page's other scripts have put geometry and statistics into window.FEATVIZ. Pictures are drawn
// on canvases but never read from them, which file:// would refuse.
"use strict";

const STATS = ["min", "max", "mean", "std", "zeros", "nonfinite"];

/** Make an element: make("p", {className: "x"}, "text", child). Text is never parsed as HTML. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Four digits, with a true minus; a dash for what is not a number. */
function digits(value) {
  return Number.isFinite(value) ? String(Number(value.toPrecision(4))).replace("-", "−") : "–";
}

/** A share 0..1; neither 0 % nor 100 % unless it is exact. */
function percent(share) {
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  if (share < 1 && share >= 0.9995) return "> 99.9 %";
  return `${(100 * share).toFixed(1)} %`;
}

/** Numbers from base64 of little-endian float32. */
function floats(text) {
  return new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
}

// ---------------------------------------------------------------------------------------------
// One grid: where its tiles are, and what is known of their channels.

class Grid {
  constructor(entry) {
    Object.assign(this, entry);
    this.channels = entry.channels || Array.from({ length: entry.maps }, (_, i) => i);
    this.slots = new Map(this.channels.map((channel, slot) => [channel, slot]));
    this.columns = {}; // numbers by their name, decoded when they are first asked for
    this.order = null; // slots by their place; null while nothing is sorted
  }

  /** A number of a channel, NaN if there is no such channel. A column of one number holds for all. */
  stat(channel, name) {
    const column = (this.columns[name] ??= floats(this.stats[STATS.indexOf(name)]));
    return channel < this.maps ? column[column.length === 1 ? 0 : channel] : NaN;
  }

  /** x, y, width and height of the n-th place for a tile, in the picture's own pixels. */
  place(n) {
    const [height, width] = this.tile;
    const [row, column] = [Math.floor(n / this.nrow), n % this.nrow];
    const pad = this.padding;
    return [pad + column * (width + pad), pad + row * (height + pad), width, height];
  }

  /** Which channel is drawn at x, y; null on the padding and behind the last tile. */
  channelAt(x, y) {
    const [height, width] = this.tile;
    const [column, row] = [x, y].map((v, i) =>
      Math.floor((v - this.padding) / ([width, height][i] + this.padding)));
    const n = row * this.nrow + column;
    const [left, top] = this.place(n);
    const inside = column >= 0 && row >= 0 && column < this.nrow && x < left + width && y < top + height;
    return inside ? this.channelOf(Math.floor(n / this.slices)) : null;
  }

  /** The channel at the n-th place for channels. */
  channelOf(n) {
    const slot = this.order ? this.order[n] : n;
    return this.channels[slot] ?? null;
  }

  /** The place of a channel; -1 where it is not drawn. */
  placeOf(channel) {
    const slot = this.slots.get(channel);
    if (slot === undefined) return -1;
    return this.order ? this.order.indexOf(slot) : slot;
  }

  allZero(channel) {
    return this.stat(channel, "zeros") === 1 && this.stat(channel, "nonfinite") === 0;
  }

  /** What a channel's tile is called, with the channels that share it. */
  title(channel) {
    const others = (this.collapsed?.[channel] || []).filter((other) => other !== channel);
    return `Channel ${channel}` + (others.length ? `, and ${others.join(", ")} like it` : "");
  }

  sentence(channel) {
    const own = (name) => digits(this.stat(channel, name));
    const bad = this.stat(channel, "nonfinite");
    return `min ${own("min")} · max ${own("max")} · mean ${own("mean")} · zeros ` +
      percent(this.stat(channel, "zeros")) + (bad ? ` · ${bad} NaN or infinite` : "");
  }
}

// ---------------------------------------------------------------------------------------------
// A grid on the page: a canvas over its picture shows marks and the sorted tiles.

class Frame {
  constructor(element, group) {
    this.element = element;
    this.group = group;
    this.image = element.querySelector("img");
    this.grid = new Grid(window.FEATVIZ[element.dataset.grid]);
    this.canvas = make("canvas", { ariaHidden: "true" });
    this.canvas.setAttribute("aria-hidden", "true");
    this.visible = false;
    element.append(this.canvas);
    element.tabIndex = 0;
    element.setAttribute("role", "application");
    element.setAttribute("aria-roledescription", "grid of feature maps");
    const keys = this.grid.channels.length ? " Arrow keys move, Enter enlarges." : "";
    element.setAttribute("aria-label", `${this.image.alt}.${keys}`);
    this.listen();
  }

  /** The picture of what the model saw: beside the grid, or at the head of the page. */
  get input() {
    const seen = this.element.closest(".page").querySelectorAll(".seen img");
    const figure = this.element.parentElement;
    return figure.querySelector("figcaption img") || seen["other" in figure.dataset ? 1 : 0];
  }

  get name() {
    return this.element.parentElement.querySelector(".name").textContent;
  }

  listen() {
    const on = (name, handler) => this.element.addEventListener(name, handler);
    on("pointermove", (event) => this.point(event));
    on("pointerleave", () => this.group.activate(null, null));
    on("blur", () => this.group.activate(null, null));
    on("keydown", (event) => this.key(event));
    on("click", (event) => {
      const channel = this.channelUnder(event);
      if (channel !== null) viewer.open(this, channel);
    });
    this.image.addEventListener("load", () => this.paint());
    sight.observe(this.element);
    size.observe(this.element);
  }

  channelUnder(event) {
    const box = this.image.getBoundingClientRect();
    const zoom = this.grid.size[0] / box.width;
    return this.grid.channelAt((event.clientX - box.left) * zoom, (event.clientY - box.top) * zoom);
  }

  point(event) {
    const channel = this.channelUnder(event);
    this.group.activate(this, channel);
    tip.show(this, channel, event.clientX, event.clientY);
  }

  key(event) {
    const { nrow, slices, channels } = this.grid;
    const row = Math.max(1, Math.floor(nrow / slices));
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row,
      Home: -Infinity, End: Infinity };
    const now = this.group.active;
    if (event.key in steps) {
      const from = now === null ? 0 : this.grid.placeOf(now) + steps[event.key];
      this.cursor(Math.min(channels.length - 1, Math.max(0, from)));
    } else if ((event.key === "Enter" || event.key === " ") && now !== null) {
      viewer.open(this, now);
    } else return;
    event.preventDefault();
  }

  cursor(place) {
    if (!this.grid.channels.length) return; // one tile of all channels
    const channel = this.grid.channelOf(place);
    this.group.activate(this, channel);
    const [x, y, , height] = this.grid.place(place * this.grid.slices);
    const box = this.image.getBoundingClientRect();
    const zoom = box.width / this.grid.size[0];
    tip.show(this, channel, box.left + x * zoom, box.top + (y + height) * zoom);
    announce(`${this.grid.title(channel)}: ${this.grid.sentence(channel)}`);
  }

  /** Draw what is to be drawn, at the size at which it is seen; nothing while out of sight. */
  paint() {
    const { canvas, grid, group } = this;
    const marks = group.marks.filter((channel) => grid.placeOf(channel) >= 0);
    const shown = this.visible && this.image.complete && (grid.order || marks.length || group.active !== null);
    const dense = window.devicePixelRatio || 1;
    canvas.width = shown ? Math.round(this.image.clientWidth * dense) : 0;
    canvas.height = shown ? Math.round(this.image.clientHeight * dense) : 0;
    if (!shown || !canvas.width) return;
    const pen = canvas.getContext("2d");
    const zoom = canvas.width / grid.size[0];
    pen.scale(zoom, canvas.height / grid.size[1]);
    if (grid.order) this.sorted(pen);
    for (const channel of marks) this.outline(pen, channel, "#ffb000", 2 * dense / zoom);
    if (group.active !== null) this.outline(pen, group.active, "#3ea6ff", 3 * dense / zoom);
  }

  sorted(pen) {
    const { grid, image } = this;
    pen.drawImage(image, 0, 0, ...grid.size);
    grid.order.forEach((slot, place) => {
      for (let slice = 0; slice < grid.slices; slice++) {
        const from = grid.place(slot * grid.slices + slice);
        pen.drawImage(image, ...from, ...grid.place(place * grid.slices + slice));
      }
    });
  }

  outline(pen, channel, color, width) {
    const place = this.grid.placeOf(channel);
    if (place < 0) return;
    pen.strokeStyle = color;
    pen.lineWidth = width;
    for (let slice = 0; slice < this.grid.slices; slice++) {
      const [x, y, w, h] = this.grid.place(place * this.grid.slices + slice);
      pen.strokeRect(x, y, w, h);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Figures whose tiles belong together: they are sorted and marked by channel, all alike.

class Group {
  constructor(element) {
    this.active = null; // the channel under the pointer or the keyboard's cursor
    this.chosen = null; // the channel that was enlarged last
    this.marks = [];
    this.frames = [...element.querySelectorAll("[data-grid]")].map((e) => new Frame(e, this));
    this.frames.forEach((frame) => frames.set(frame.element, frame));
    const compare = element.querySelector("[data-compare]");
    if (compare) compare.addEventListener("click", () => slider.open(this));
  }

  get channels() {
    return [...new Set(this.frames.flatMap((frame) => frame.grid.channels))].sort((a, b) => a - b);
  }

  paint() {
    this.frames.forEach((frame) => frame.paint());
  }

  activate(frame, channel) {
    if (channel === null) tip.hide();
    if (channel === this.active) return;
    this.active = channel;
    this.paint();
  }

  outlineZeros(on) {
    const zero = (channel) => this.frames.every(({ grid }) => channel < grid.maps && grid.allZero(channel));
    this.marks = on ? this.channels.filter(zero) : [];
    this.paint();
  }

  sort(by) {
    const score = by === "drawn" ? null : by === "similarity" ? this.distances() : this.means(by);
    for (const { grid } of this.frames) {
      const value = (slot) => score.get(grid.channels[slot]);
      const slots = grid.channels.map((_, slot) => slot);
      const whole = !score || !slots.length; // nothing to sort in one tile of all channels
      grid.order = whole ? null : slots.sort((a, b) => value(a) - value(b) || a - b);
    }
    this.paint();
  }

  /** By channel, less the larger its statistic is on average; what is no number comes last. */
  means(by) {
    if (by === "index") return new Map(this.channels.map((c) => [c, c]));
    const one = (grid, c) => (by === "variance" ? grid.stat(c, "std") ** 2 : grid.stat(c, by));
    return new Map(this.channels.map((c) => {
      const own = this.frames.map(({ grid }) => one(grid, c)).filter(Number.isFinite);
      return [c, own.length ? -own.reduce((a, b) => a + b, 0) / own.length : Infinity];
    }));
  }

  /** By channel, how far its min, max, mean, std and zeros in all figures are from those of the
      chosen channel, each in standard deviations over the figure's channels. */
  distances() {
    const chosen = this.chosen ?? this.channels[0];
    const sums = new Map(this.channels.map((c) => [c, 0]));
    for (const { grid } of this.frames) {
      for (const name of STATS.slice(0, 5)) {
        const all = grid.channels.map((c) => grid.stat(c, name)).filter(Number.isFinite);
        const mean = all.reduce((a, b) => a + b, 0) / all.length;
        const spread = Math.sqrt(all.reduce((a, b) => a + (b - mean) ** 2, 0) / all.length) || 1;
        for (const c of grid.channels) {
          const step = (grid.stat(c, name) - grid.stat(chosen, name)) / spread;
          sums.set(c, sums.get(c) + (Number.isFinite(step) ? step ** 2 : 1));
        }
      }
    }
    return sums.set(chosen, -1);
  }
}
