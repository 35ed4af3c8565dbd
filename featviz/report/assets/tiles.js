// Owns the grids of feature maps, and the helpers that all scripts use (make, digits, percent).
//
//   Grid    where the tiles of one picture lie, and the statistics of its channels
//   Frame   a grid on the page: canvases over the picture show its tiles, sorted or enlarged, with the
//           numbers of their channels, the input below the maps, and outlines
//   Group   the frames of one tensor, which are sorted, folded and marked alike
//
// It reads window.FEATVIZ, which the scripts with the numbers of the page have filled (grids.py). It
// paints pictures on canvases but never reads pixels back, which a browser refuses from file://.
"use strict";

const MOST_PIXELS = 16e6; // of a canvas
const CAPTION = 15; // pixels of the line below a tile that has the number of its channel
const READABLE = 20; // pixels of a tile's width from which on there is room for it
const FOLDED_TILE = 80; // pixels of a tile where a layer shows its first channels
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

/** A share 0..1, on one line; neither 0 % nor 100 % unless it is exact. */
function percent(share) {
  if (share > 0 && share < 0.0005) return "<\u00a00.1\u00a0%";
  if (share < 1 && share >= 0.9995) return ">\u00a099.9\u00a0%";
  return `${(100 * share).toFixed(1)}\u00a0%`;
}

/** Numbers from base64 of their bytes, which are little-endian. */
function decoded(text, type = Float32Array) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new type(bytes.buffer);
}

const marked = { spot: null }; // {x, y} of a tile, 0 to 1, that has a dot in all; set by places.js

// ---------------------------------------------------------------------------------------------
// One grid: where its tiles are, and what is known of their channels.

class Grid {
  constructor(entry) {
    Object.assign(this, entry);
    this.channels = entry.channels || Array.from({ length: entry.maps }, (_, i) => i);
    this.slots = new Map(this.channels.map((channel, slot) => [channel, slot]));
    this.columns = {}; // numbers by their name, decoded when they are first asked for
    this.order = null; // slots by their place, all or the first ones; null while nothing is sorted
  }

  /** How many channels have a place. */
  get count() {
    return this.order ? this.order.length : this.channels.length;
  }

  /** A number of a channel, NaN if there is no such channel. A column of one number holds for all. */
  stat(channel, name) {
    const text = name === "change" ? this.change : this.stats[STATS.indexOf(name)];
    if (text === undefined) return NaN;
    const column = (this.columns[name] ??= decoded(text));
    return channel < this.maps ? column[column.length === 1 ? 0 : channel] : NaN;
  }

  /** x, y, width and height of the n-th place for a tile: in the picture's own pixels, or in those
      of another view of it, with tiles of another size in rows of another length. */
  place(n, view = this) {
    const [height, width] = view.tile;
    const [row, column] = [Math.floor(n / view.nrow), n % view.nrow];
    const pad = view.padding;
    return [pad + column * (width + pad), pad + row * (height + pad + (view.caption ?? 0)), width, height];
  }

  /** Which channel is shown at x, y; null on the padding and behind the last tile. */
  channelAt(x, y, view = this) {
    const [height, width] = view.tile;
    const column = Math.floor((x - view.padding) / (width + view.padding));
    const row = Math.floor((y - view.padding) / (height + view.padding + (view.caption ?? 0)));
    const n = row * view.nrow + column;
    const [left, top] = this.place(n, view);
    const inside = column >= 0 && row >= 0 && column < view.nrow && x < left + width && y < top + height;
    return inside ? this.channelOf(Math.floor(n / this.slices)) : null;
  }

  /** A view with tiles whose longer side has so many pixels, as many in a row as there is room for,
      and no more than the picture has. */
  resized(pixels, room) {
    const padding = 3;
    const zoom = pixels / Math.max(...this.tile);
    const tile = this.tile.map((side) => Math.max(2, Math.round(side * zoom)));
    const fit = Math.floor((room - padding) / (tile[1] + padding) / this.slices) * this.slices;
    const nrow = Math.max(this.slices, Math.min(this.nrow, fit));
    const rows = Math.ceil(Math.max(1, this.count * this.slices) / nrow);
    const caption = tile[1] * this.slices >= READABLE ? CAPTION : 0; // the number of the channel
    const size = [nrow * (tile[1] + padding) + padding, rows * (tile[0] + padding + caption) + padding];
    return { nrow, padding, tile, caption, size };
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
    const change = this.change === undefined ? "" : `relative difference ${own("change")}`;
    if (change && Number.isNaN(bad)) return `${change} at most`; // a map of differences
    return `min ${own("min")} · max ${own("max")} · mean ${own("mean")} · zeros ` +
      percent(this.stat(channel, "zeros")) + (bad ? ` · ${bad} NaN or infinite` : "") + (change && ` · ${change}`);
  }
}

// ---------------------------------------------------------------------------------------------
// A grid on the page: canvases over its picture show sorted or enlarged tiles, the input and marks.

class Frame {
  constructor(element, group) {
    this.element = element;
    this.group = group;
    this.image = element.querySelector("img");
    this.grid = new Grid(window.FEATVIZ[element.dataset.grid]);
    this.view = this.grid; // where tiles are seen: as in the picture, or of another size
    this.last = null; // the channel at which the keyboard's cursor was last
    this.layers = {}; // canvases by what is on them
    this.visible = false;
    this.pixels = 0; // of a tile's longer side, as the user has set it
    this.room = 0; // the width for which its tiles are laid out
    element.tabIndex = 0;
    element.classList.toggle("grey", Boolean(this.grid.grey));
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
    const own = figure.querySelector("figcaption img") || figure.parentElement.querySelector("figcaption img");
    return own || (seen["other" in figure.dataset ? 1 : 0] ?? seen[0]); // both runs may have seen the same
  }

  /** What tells it from the others of its group: the run, or the image. */
  get name() {
    return this.element.parentElement.querySelector(".name")?.textContent ?? this.element.dataset.name;
  }

  /** Whether its maps can be laid over the input. */
  get fits() {
    return Boolean(this.grid.scene) && !this.grid.over && this.grid.slices === 1 && this.grid.channels.length > 0;
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
    const zoom = this.view.size[0] / box.width;
    return this.grid.channelAt((event.clientX - box.left) * zoom, (event.clientY - box.top) * zoom, this.view);
  }

  point(event) {
    const channel = this.channelUnder(event);
    this.group.activate(this, channel);
    tip.show(this, channel, event.clientX, event.clientY);
  }

  key(event) {
    const { slices, channels } = this.grid;
    const row = Math.max(1, Math.floor(this.view.nrow / slices));
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row,
      Home: -Infinity, End: Infinity };
    const now = this.group.active ?? this.last;
    if (event.key in steps) {
      const from = now === null ? 0 : this.grid.placeOf(now) + steps[event.key];
      this.cursor(Math.min(this.grid.count - 1, Math.max(0, from)));
    } else if (event.key === "Enter" || event.key === " ") {
      if (channels.length) viewer.open(this, this.grid.placeOf(now) < 0 ? this.grid.channelOf(0) : now);
    } else return;
    event.preventDefault();
  }

  cursor(place) {
    if (!this.grid.channels.length) return; // one tile of all channels
    const channel = this.last = this.grid.channelOf(place);
    this.group.activate(this, channel);
    const [x, y, , height] = this.grid.place(place * this.grid.slices, this.view);
    const box = this.image.getBoundingClientRect();
    const zoom = box.width / this.view.size[0];
    tip.show(this, channel, box.left + x * zoom, box.top + (y + height) * zoom);
    announce(`${this.grid.title(channel)}: ${this.grid.sentence(channel)}`);
  }

  /** Show tiles whose longer side has so many pixels; with 0 they are as large as they were drawn,
      or fill the width, with the numbers of their channels below them. */
  resize(pixels) {
    const { grid, image, element, group } = this;
    const wide = pixels > 0 || group.folded;
    element.parentElement.classList.toggle("sized", wide && grid.channels.length > 0);
    const { place } = this;
    const room = this.room = this.width;
    this.pixels = pixels;
    this.view = grid;
    if (room > 0 && grid.channels.length && !place.matches(".both > .maps")) {
      const view = grid.resized(pixels || this.usual(room), room);
      if (wide || (view.caption && !element.closest(".labelled"))) this.view = view;
    }
    const own = this.view === grid;
    element.style.width = own ? "" : "fit-content"; // canvases are as wide as the frame
    image.style.width = own ? "" : `${this.view.size[0]}px`;
    image.style.height = own ? "" : `${this.view.size[1]}px`;
    this.paint();
  }

  /** The element whose width it may take. */
  get place() {
    return this.element.closest(".pair > .maps, .both > .maps, .one, .beside");
  }

  /** How many pixels wide it may be; 0 while it is hidden. */
  get width() {
    const { place } = this;
    if (place.matches(".beside")) return this.element.parentElement.clientWidth;
    return place.clientWidth - (place.matches(".one") && innerWidth > 720 ? 280 : 0);
  }

  /** Lay the tiles out anew where there is another width for them, as when it came out of hiding. */
  fit() {
    if (this.width === this.room) this.paint();
    else this.resize(this.pixels);
  }

  /** Pixels of a tile's longer side while nobody has set them. */
  usual(room) {
    const { tile, nrow, count, slices } = this.grid;
    if (this.group.folded) return FOLDED_TILE;
    const longer = Math.max(...tile);
    if (!this.place.matches(".beside")) return longer;
    const filling = Math.floor((room - 3) / Math.min(nrow, count * slices)) - 3;
    return Math.max(longer, Math.min(filling * longer / tile[1], 2 * FOLDED_TILE));
  }

  /** Draw what is to be drawn, at the size at which it is seen; nothing while out of sight. */
  paint() {
    const { grid, group, view } = this;
    const marks = group.marks.filter((channel) => grid.placeOf(channel) >= 0);
    const ready = this.visible && this.image.complete && this.image.naturalWidth > 0;
    const over = group.over && this.fits && this.input.complete;
    const moved = grid.order || view !== grid || over;
    this.element.classList.toggle("laid", Boolean(over));
    this.layer("under", ready && over, (pen) => this.tiles(pen, this.input, null));
    this.layer("tiles", ready && moved, (pen) => this.tiles(pen, this.image, grid));
    if (this.layers.tiles) this.layers.tiles.style.opacity = over ? group.over / 100 : "";
    this.layer("names", ready && view.caption, (pen) => this.names(pen));
    this.element.classList.toggle("redrawn", Boolean(ready && moved));
    const spot = this.grid.scene ? marked.spot : null;
    this.layer("spots", ready && spot, (pen, zoom) => this.spots(pen, spot, 1 / zoom));
    this.layer("marks", ready && (marks.length || group.active !== null), (pen, zoom) => {
      for (const channel of marks) this.outline(pen, channel, "#ffb000", 2 / zoom);
      if (group.active !== null) this.outline(pen, group.active, "#6cc0ff", 3 / zoom);
    });
  }

  /** Draw on a canvas over the picture, in units of the view; without `on` it is empty. */
  layer(name, on, draw) {
    if (!on && !this.layers[name]) return;
    const canvas = this.layers[name] ??= this.element.appendChild(make("canvas", { className: name }));
    canvas.setAttribute("aria-hidden", "true");
    const { clientWidth: width, clientHeight: height } = this.image;
    const dense = Math.min(window.devicePixelRatio || 1, Math.sqrt(MOST_PIXELS / (width * height || 1)));
    canvas.width = on ? Math.round(width * dense) : 0;
    canvas.height = on ? Math.round(height * dense) : 0;
    if (!canvas.width) return;
    const pen = canvas.getContext("2d");
    const [across, down] = this.view.size;
    pen.scale(canvas.width / across, canvas.height / down);
    pen.imageSmoothingEnabled = name === "under";
    draw(pen, width / across);
  }

  /** All tiles in their order, cut out of a grid; without one, the whole picture in each place. */
  tiles(pen, picture, grid) {
    const { order, slices } = this.grid;
    if (this.view === this.grid && grid) pen.drawImage(picture, 0, 0, ...grid.size); // the padding
    for (let place = 0; place < Math.max(1, this.grid.count) * slices; place++) {
      const slot = Math.floor(place / slices);
      const from = grid && grid.place((order ? order[slot] : slot) * slices + (place % slices));
      const to = this.grid.place(place, this.view);
      if (from) pen.drawImage(picture, ...from, ...to);
      else pen.drawImage(picture, ...to);
    }
  }

  /** The numbers of the channels, below their tiles. */
  names(pen) {
    const { view, grid } = this;
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.fillStyle = getComputedStyle(this.element).color;
    for (let n = 0; n < grid.count; n++) {
      const [left, top, width, height] = grid.place(n * grid.slices, view);
      const across = grid.slices * (width + view.padding) - view.padding;
      pen.fillText(grid.channelOf(n), left + across / 2, top + height + CAPTION - 4);
    }
  }

  /** A dot at the same place of each tile. */
  spots(pen, { x, y }, pixel) {
    const count = Math.max(1, this.grid.count) * this.grid.slices;
    for (const [ink, radius] of [["#000000", 3.5], ["#6cc0ff", 2.5]]) {
      pen.fillStyle = ink;
      for (let n = 0; n < count; n++) {
        const [left, top, width, height] = this.grid.place(n, this.view);
        pen.beginPath();
        pen.arc(left + x * width, top + y * height, radius * pixel, 0, 7);
        pen.fill();
      }
    }
  }

  /** Where in its tile the pointer is, from 0 to 1; more between tiles. */
  spotAt(clientX, clientY) {
    const box = this.image.getBoundingClientRect();
    const zoom = this.view.size[0] / box.width;
    const [height, width] = this.view.tile;
    const { padding, caption = 0 } = this.view;
    const x = ((clientX - box.left) * zoom - padding) % (width + padding);
    const y = ((clientY - box.top) * zoom - padding) % (height + padding + caption);
    return { x: x / width, y: y / height };
  }

  /** A line with a dark edge, which is seen on every grey. */
  outline(pen, channel, color, width) {
    const place = this.grid.placeOf(channel);
    if (place < 0) return;
    for (let slice = 0; slice < this.grid.slices; slice++) {
      const box = this.grid.place(place * this.grid.slices + slice, this.view);
      for (const [ink, wide] of [["#000000", 2 * width], [color, width]]) {
        pen.strokeStyle = ink;
        pen.lineWidth = wide;
        pen.strokeRect(...box);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Figures whose tiles belong together: they are sorted and marked by channel, all alike.

class Group {
  constructor(element) {
    this.active = null; // the channel under the pointer or the keyboard's cursor
    this.marks = [];
    this.over = 0; // per cent of the maps over the input; 0 shows them by themselves
    this.element = element;
    this.most = Number(element.dataset.fold) || Infinity; // channels that are shown while it is folded
    this.frames = [...element.querySelectorAll("[data-grid]")].map((e) => new Frame(e, this));
    this.frames.forEach((frame) => frames.set(frame.element, frame));
  }

  get folded() {
    return Number.isFinite(this.most);
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

  resize(pixels) {
    this.frames.forEach((frame) => frame.resize(pixels));
  }

  lay(over) {
    this.over = over;
    this.paint();
  }

  outlineZeros(on) {
    const zero = (channel) => this.frames.every(({ grid }) => channel < grid.maps && grid.allZero(channel));
    this.marks = on ? this.channels.filter(zero) : [];
    this.paint();
  }

  /** Sort tiles; a folded group shows the first ones, of maps as they were drawn the most varied. */
  sort(by) {
    const criterion = by === "drawn" && this.folded ? "variance" : by;
    const score = criterion === "drawn" ? null : this.means(criterion);
    for (const { grid } of this.frames) {
      const value = (slot) => score.get(grid.channels[slot]);
      const slots = grid.channels.map((_, slot) => slot);
      const whole = !score || !slots.length; // nothing to sort in one tile of all channels
      grid.order = whole ? null : slots.sort((a, b) => value(a) - value(b) || a - b).slice(0, this.most);
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
}
