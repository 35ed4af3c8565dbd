// Owns the grids of feature maps, and the helpers that all scripts use (make, digits, percent, decoded).
//
//   Grid    where the tiles of one picture lie, and the statistics of its channels
//   Tiles   a grid on the page: canvases over the picture show its tiles, sorted or enlarged, with the
//           numbers of their channels; the page of a series has no more
//   Frame   tiles with the input below the maps, outlines, and what the pointer asks for
//   Group   the frames of one tensor, which are sorted, folded and marked alike
//
// A slot is the number of a tile in the picture, a position that of a tile as it is shown: sorting
// shows the slots in another order. A box is [left, top, width, height] in pixels.
//
// Frames read window.FEATVIZ, which the scripts with the numbers of the page have filled (grids.py). It
// paints pictures on canvases but never reads pixels back, which a browser refuses from file://.
"use strict";

const MOST_PIXELS = 16e6; // of a canvas
const GAP = 3; // pixels between tiles that are laid out here
const CAPTION = 15; // pixels of the line below a tile that has the number of its channel
const READABLE = 20; // pixels of a tile's width from which on there is room for it
const SMALL_TILE = 80; // to which larger tiles shrink, so that more of them stand in a row
const LARGE_TILE = 160; // to which smaller tiles grow where there is room
const TALLEST = 320; // of a tile that is more than twice as high as wide, where nobody has set a size
const FEWEST = 4; // channels in a row, if there is room
const WIDER = 1.5; // how many times more stand in a row than in the picture, which is about square
const STATS = ["min", "max", "mean", "std", "zeros", "nonfinite"];
const MARKED = "#ffb000";
const ACTIVE = "#6cc0ff";
const marked = { spot: null }; // {x, y} of a tile, 0 to 1, that has a dot in all; set by places.js

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

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// ---------------------------------------------------------------------------------------------
// One grid: where its tiles are, and what is known of their channels.

class Grid {
  /** @param entry as grids.py writes it: nrow, padding, tile [height, width], size [width, height],
      maps, slices (tiles of a channel), stats, and what only some have */
  constructor(entry) {
    Object.assign(this, entry);
    this.channels = entry.channels || Array.from({ length: entry.maps }, (_, channel) => channel); // by slot
    this.slots = new Map(this.channels.map((channel, slot) => [channel, slot]));
    this.columns = {}; // numbers by their name, decoded when they are first asked for
    this.order = null; // slots by their position, all or the first ones; null while nothing is sorted
  }

  /** How many channels are shown. */
  get count() {
    return this.order ? this.order.length : this.channels.length;
  }

  /** How many tiles are shown; a picture of all channels in one tile has no channels. */
  get tileCount() {
    return Math.max(1, this.count) * this.slices;
  }

  /** A number of a channel, NaN if there is no such channel. A column of one number holds for all. */
  stat(channel, name) {
    const text = name === "change" ? this.change : this.stats[STATS.indexOf(name)];
    if (text === undefined || channel >= this.maps) return NaN;
    this.columns[name] ??= decoded(text);
    const column = this.columns[name];
    return column[column.length === 1 ? 0 : channel];
  }

  /** The box of the tile at a position.
      @param view this grid in the pixels of its picture, or another layout of it (`laidOut`) */
  box(position, view = this) {
    const [height, width] = view.tile;
    const { padding, caption = 0 } = view;
    const row = Math.floor(position / view.nrow);
    const column = position % view.nrow;
    return [padding + column * (width + padding), padding + row * (height + padding + caption), width, height];
  }

  /** The channel that is shown at x, y in pixels; null on the padding and behind the last tile. */
  channelAt(x, y, view = this) {
    const [height, width] = view.tile;
    const { padding, caption = 0 } = view;
    const column = Math.floor((x - padding) / (width + padding));
    const row = Math.floor((y - padding) / (height + padding + caption));
    if (column < 0 || row < 0) return null;
    const position = row * view.nrow + column;
    const [left, top] = this.box(position, view);
    if (x >= left + width || y >= top + height) return null;
    return this.channelOf(Math.floor(position / this.slices));
  }

  /** How many channels stand in a row of so many pixels: as many tiles whose longer side has `pixels`
      as have room; with 0 as many as make a page short, as long as tiles that were not drawn smaller
      are not smaller than SMALL_TILE. */
  channelsPerRow(room, pixels = 0, isFolded = false) {
    const { tile: [height, width], nrow, slices } = this;
    const longer = Math.max(height, width);
    const least = this.narrowest(pixels);
    const fitting = (side) => Math.floor((room - GAP) / (Math.max(least, (side * width) / longer) + GAP) / slices);
    if (pixels) return Math.max(1, fitting(pixels));
    const most = fitting(isFolded ? SMALL_TILE : Math.min(longer, SMALL_TILE));
    const wanted = Math.max(FEWEST, fitting(LARGE_TILE) + 1, Math.round((WIDER * nrow) / slices));
    return clamp(wanted, 1, Math.max(1, most));
  }

  /** Pixels to which a side of a tile shrinks at most: as many as its number takes, but for stripes, which
      have no padding, and where the user has set the size. */
  narrowest(pixels) {
    return pixels || !this.padding ? 2 : READABLE;
  }

  /** A layout of tiles with so many channels in a row: of tiles that fill `room`, or whose longer side
      has so many pixels. */
  laidOut(room, columns, pixels = 0) {
    const padding = GAP;
    const longer = Math.max(...this.tile);
    const most = this.tile[0] > 2 * this.tile[1] ? TALLEST : Infinity;
    const nrow = Math.min(columns, this.count) * this.slices;
    const filling = ((Math.floor((room - GAP) / nrow) - GAP) * longer) / this.tile[1];
    const zoom = (pixels || Math.min(filling, most, Math.max(longer, LARGE_TILE))) / longer;
    const tile = this.tile.map((side) => Math.max(this.narrowest(pixels), Math.round(side * zoom)));
    const [height, width] = tile;
    const rows = Math.ceil(this.tileCount / nrow);
    const caption = width * this.slices >= READABLE ? CAPTION : 0; // the number of the channel
    const size = [nrow * (width + padding) + padding, rows * (height + padding + caption) + padding];
    return { nrow, padding, tile, caption, size };
  }

  /** The channel at the n-th position for channels; null behind the last one. */
  channelOf(position) {
    const slot = this.order ? this.order[position] : position;
    return this.channels[slot] ?? null;
  }

  /** The position of a channel; -1 where it is not shown. */
  positionOf(channel) {
    const slot = this.slots.get(channel);
    if (slot === undefined) return -1;
    return this.order ? this.order.indexOf(slot) : slot;
  }

  allZero(channel) {
    return this.stat(channel, "zeros") === 1 && this.stat(channel, "nonfinite") === 0;
  }

  /** What a channel's tile is called, with the channels that share it. */
  title(channel) {
    const shared = this.collapsed?.[channel] || [];
    const others = shared.filter((other) => other !== channel);
    const names = others.length ? `, and ${others.join(", ")} like it` : "";
    return `Channel ${channel}${names}`;
  }

  /** The numbers of a channel. */
  sentence(channel) {
    const number = (name) => digits(this.stat(channel, name));
    const nonfinite = this.stat(channel, "nonfinite");
    const change = this.change === undefined ? "" : `relative difference ${number("change")}`;
    if (change && Number.isNaN(nonfinite)) return `${change} at most`; // a map of differences
    const numbers = [`min ${number("min")}`, `max ${number("max")}`, `mean ${number("mean")}`];
    numbers.push(`zeros ${percent(this.stat(channel, "zeros"))}`);
    if (nonfinite) numbers.push(`${nonfinite} NaN or infinite`);
    if (change) numbers.push(change);
    return numbers.join(" · ");
  }
}

// ---------------------------------------------------------------------------------------------
// A grid on the page: canvases over its picture show sorted or enlarged tiles. A frame has the input
// and marks, too, and answers the pointer and keys.

class Tiles {
  /** @param element has the picture
      @param entry as grids.py writes it */
  constructor(element, entry) {
    this.element = element;
    this.image = element.querySelector("img");
    this.grid = new Grid(entry);
    this.view = this.grid; // where tiles are seen: as in the picture, or laid out anew
    this.canvases = {}; // by what is on them
    element.classList.toggle("grey", Boolean(this.grid.grey));
  }

  /** Show the tiles where another layout has them, or as they were drawn. */
  show(view) {
    const isDrawn = view === this.grid;
    const [width, height] = view.size;
    this.view = view;
    this.element.style.width = isDrawn ? "" : "fit-content"; // canvases are as wide as the frame
    this.image.style.width = isDrawn ? "" : `${width}px`;
    this.image.style.height = isDrawn ? "" : `${height}px`;
  }

  /** Draw on a canvas over the picture, or empty it.
      @param name of the canvas, which is made when it is first drawn on
      @param paint takes a pen in units of the view, and the size of a pixel of the screen in these */
  canvas(name, isDrawn, paint) {
    if (!isDrawn && !this.canvases[name]) return;
    this.canvases[name] ??= this.element.appendChild(make("canvas", { className: name, ariaHidden: "true" }));
    const canvas = this.canvases[name];
    const { clientWidth: width, clientHeight: height } = this.image;
    const density = Math.min(window.devicePixelRatio || 1, Math.sqrt(MOST_PIXELS / (width * height || 1)));
    canvas.width = isDrawn ? Math.round(width * density) : 0;
    canvas.height = isDrawn ? Math.round(height * density) : 0;
    if (!canvas.width) return;
    const pen = canvas.getContext("2d");
    const [across, down] = this.view.size;
    pen.scale(canvas.width / across, canvas.height / down);
    // every pixel of a map is a value, which stays a square, but where there is no room for it
    pen.imageSmoothingEnabled = name === "under" || this.view.tile[0] < this.grid.tile[0];
    paint(pen, across / width);
  }

  /** All tiles in their order, cut out of the picture. */
  paintTiles(pen) {
    const { grid, view, image } = this;
    const { order, slices } = grid;
    if (view === grid) pen.drawImage(image, 0, 0, ...grid.size); // the padding
    for (let position = 0; position < grid.tileCount; position++) {
      const shown = Math.floor(position / slices);
      const slot = order ? order[shown] : shown;
      const source = grid.box(slot * slices + (position % slices));
      pen.drawImage(image, ...source, ...grid.box(position, view));
    }
  }

  /** The numbers of the channels, below their tiles. */
  paintNames(pen) {
    const { view, grid } = this;
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.fillStyle = getComputedStyle(this.element).color;
    for (let position = 0; position < grid.count; position++) {
      const [left, top, width, height] = grid.box(position * grid.slices, view);
      const channelWidth = grid.slices * (width + view.padding) - view.padding;
      pen.fillText(grid.channelOf(position), left + channelWidth / 2, top + height + CAPTION - 4);
    }
  }
}

class Frame extends Tiles {
  constructor(element, group) {
    super(element, window.FEATVIZ[element.dataset.grid]);
    this.group = group;
    this.last = null; // the channel at which the keyboard's cursor was last
    this.visible = false;
    this.pixels = 0; // of a tile's longer side, as the user has set it
    this.room = 0; // the width for which its tiles are laid out
    element.tabIndex = 0;
    element.setAttribute("role", "application");
    element.setAttribute("aria-roledescription", "grid of feature maps");
    const keys = this.grid.channels.length ? " Arrow keys move, Enter enlarges." : "";
    element.setAttribute("aria-label", `${this.image.alt}.${keys}`);
    this.listen();
  }

  /** Whether it is of the run that this one is compared with. */
  get isOther() {
    return "other" in this.element.parentElement.dataset;
  }

  /** The name of its image. */
  get imageName() {
    return this.element.dataset.name;
  }

  /** What tells it from the others of its group: the run, or the image. */
  get name() {
    return this.element.parentElement.querySelector(".name")?.textContent ?? this.imageName;
  }

  /** The picture of what the model saw: beside the grid, or at the head of the page. */
  get input() {
    const figure = this.element.parentElement;
    const beside = figure.querySelector("figcaption img") || figure.parentElement.querySelector("figcaption img");
    if (beside) return beside;
    const [first, second] = this.element.closest(".page").querySelectorAll(".seen img");
    return (this.isOther ? second : first) ?? first; // both runs may have seen the same
  }

  /** Whether its maps can be laid over the input. */
  get fits() {
    const { scene, over, slices, channels } = this.grid;
    return Boolean(scene) && !over && slices === 1 && channels.length > 0;
  }

  listen() {
    const on = (name, handler) => this.element.addEventListener(name, handler);
    on("pointermove", (event) => this.point(event));
    on("pointerleave", () => this.group.activate(null));
    on("blur", () => this.group.activate(null));
    on("keydown", (event) => this.key(event));
    on("click", (event) => {
      const channel = this.channelUnder(event);
      if (channel !== null) viewer.open(this, channel);
    });
    this.image.addEventListener("load", () => this.paint());
    sight.observe(this.element);
    size.observe(this.element);
  }

  // --- pointer and keys

  /** Where the pointer is, in pixels of the view. */
  pointAt({ clientX, clientY }) {
    const { left, top, width } = this.image.getBoundingClientRect();
    const zoom = this.view.size[0] / width;
    return { x: (clientX - left) * zoom, y: (clientY - top) * zoom };
  }

  channelUnder(event) {
    const { x, y } = this.pointAt(event);
    return this.grid.channelAt(x, y, this.view);
  }

  /** Where in its tile the pointer is, {x, y} from 0 to 1; more between tiles. */
  spotAt(event) {
    const { x, y } = this.pointAt(event);
    const [height, width] = this.view.tile;
    const { padding, caption = 0 } = this.view;
    return {
      x: ((x - padding) % (width + padding)) / width,
      y: ((y - padding) % (height + padding + caption)) / height,
    };
  }

  point(event) {
    const channel = this.channelUnder(event);
    this.group.activate(channel);
    tip.show(this, channel, event.clientX, event.clientY);
  }

  key(event) {
    const { grid } = this;
    const row = Math.max(1, Math.floor(this.view.nrow / grid.slices));
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row, Home: -Infinity, End: Infinity };
    const channel = this.group.active ?? this.last;
    if (event.key in steps) {
      const position = channel === null ? 0 : grid.positionOf(channel) + steps[event.key];
      this.cursor(clamp(position, 0, grid.count - 1));
    } else if (event.key === "Enter" || event.key === " ") {
      const isShown = grid.positionOf(channel) >= 0;
      if (grid.channels.length) viewer.open(this, isShown ? channel : grid.channelOf(0));
    } else {
      return;
    }
    event.preventDefault();
  }

  /** Move the keyboard's cursor to a position, and announce its channel. */
  cursor(position) {
    if (!this.grid.channels.length) return; // one tile of all channels
    const channel = this.grid.channelOf(position);
    this.last = channel;
    this.group.activate(channel);
    const [x, y, , height] = this.grid.box(position * this.grid.slices, this.view);
    const { left, top, width } = this.image.getBoundingClientRect();
    const zoom = width / this.view.size[0];
    tip.show(this, channel, left + x * zoom, top + (y + height) * zoom);
    announce(`${this.grid.title(channel)}: ${this.grid.sentence(channel)}`);
  }

  // --- layout

  /** Show tiles whose longer side has so many pixels, and below them the numbers of their channels;
      with 0 tiles fill the width.
      @param columns channels in a row */
  resize(pixels, columns) {
    const { grid, element } = this;
    const hasTiles = grid.channels.length > 0;
    element.parentElement.classList.toggle("sized", pixels > 0 && hasTiles);
    this.pixels = pixels;
    this.room = this.width;
    let view = grid;
    if (this.room > 0 && hasTiles && !this.container.matches(".both > .maps")) {
      const laidOut = grid.laidOut(this.room, columns, pixels);
      const isCaptioned = laidOut.caption > 0 && !element.closest(".labelled");
      if (pixels > 0 || this.group.folded || isCaptioned) view = laidOut;
    }
    this.show(view);
    this.paint();
  }

  /** The element whose width it may take. */
  get container() {
    return this.element.closest(".pair > .maps, .both > .maps, .one, .beside");
  }

  /** How many pixels wide it may be; 0 while it is hidden. */
  get width() {
    const { container } = this;
    return (container.matches(".beside") ? this.element.parentElement : container).clientWidth;
  }

  /** Lay the tiles out anew where there is another width for them, as when it came out of hiding. */
  fit() {
    if (this.width === this.room) this.paint();
    else this.group.resize(this.pixels);
  }

  // --- painting

  /** Draw what is to be drawn, at the size at which it is seen; nothing while out of sight. */
  paint() {
    const { grid, group, view, image } = this;
    const isReady = this.visible && image.complete && image.naturalWidth > 0;
    const isOver = isReady && group.over > 0 && this.fits && this.input.complete;
    const isMoved = isReady && (grid.order !== null || view !== grid || isOver);
    const marks = group.marks.filter((channel) => grid.positionOf(channel) >= 0);
    const hasMarks = isReady && (marks.length > 0 || group.active !== null);
    const spot = grid.scene ? marked.spot : null;
    this.element.classList.toggle("redrawn", isMoved);
    this.canvas("under", isOver, (pen) => this.paintInput(pen));
    this.canvas("tiles", isMoved, (pen) => this.paintTiles(pen));
    if (this.canvases.tiles) this.canvases.tiles.style.opacity = isOver ? group.over / 100 : "";
    this.canvas("names", isReady && view.caption > 0, (pen) => this.paintNames(pen));
    this.canvas("spots", isReady && spot !== null, (pen, pixel) => this.paintSpot(pen, spot, pixel));
    this.canvas("marks", hasMarks, (pen, pixel) => {
      for (const channel of marks) this.outline(pen, channel, MARKED, 2 * pixel);
      if (group.active !== null) this.outline(pen, group.active, ACTIVE, 3 * pixel);
    });
  }

  /** The whole input at the position of each tile. */
  paintInput(pen) {
    for (let position = 0; position < this.grid.tileCount; position++) {
      pen.drawImage(this.input, ...this.grid.box(position, this.view));
    }
  }

  /** A dot at the same spot of each tile. */
  paintSpot(pen, { x, y }, pixel) {
    for (const { color, radius } of [{ color: "#000000", radius: 3.5 }, { color: ACTIVE, radius: 2.5 }]) {
      pen.fillStyle = color;
      for (let position = 0; position < this.grid.tileCount; position++) {
        const [left, top, width, height] = this.grid.box(position, this.view);
        pen.beginPath();
        pen.arc(left + x * width, top + y * height, radius * pixel, 0, 2 * Math.PI);
        pen.fill();
      }
    }
  }

  /** A line around the tiles of a channel, with a dark edge: it is seen on every grey. */
  outline(pen, channel, color, width) {
    const { grid, view } = this;
    const position = grid.positionOf(channel);
    if (position < 0) return;
    for (let slice = 0; slice < grid.slices; slice++) {
      const box = grid.box(position * grid.slices + slice, view);
      stroke(pen, color, width, () => pen.strokeRect(...box));
    }
  }
}

/** Draw lines twice: with a dark edge they are seen on every ground. */
function stroke(pen, color, width, lines) {
  pen.strokeStyle = "#000000";
  pen.lineWidth = 2 * width;
  lines();
  pen.strokeStyle = color;
  pen.lineWidth = width;
  lines();
}

// ---------------------------------------------------------------------------------------------
// Figures whose tiles belong together: they are sorted and marked by channel, all alike.

class Group {
  constructor(element) {
    this.active = null; // the channel under the pointer or the keyboard's cursor
    this.marks = []; // channels with an outline
    this.over = 0; // per cent of the maps over the input; 0 shows them by themselves
    this.element = element;
    this.most = Number(element.dataset.fold) || Infinity; // channels that are shown while it is folded
    this.frames = [...element.querySelectorAll("[data-grid]")].map((frame) => new Frame(frame, this));
    element.classList.toggle("folded", this.folded);
    for (const frame of this.frames) frames.set(frame.element, frame);
  }

  get folded() {
    return Number.isFinite(this.most);
  }

  /** The channels that any of its frames has, in order. */
  get channels() {
    const channels = new Set(this.frames.flatMap((frame) => frame.grid.channels));
    return [...channels].sort((a, b) => a - b);
  }

  paint() {
    for (const frame of this.frames) frame.paint();
  }

  /** Outline the channel that is pointed at; null for none. */
  activate(channel) {
    if (channel === null) tip.hide();
    if (channel === this.active) return;
    this.active = channel;
    this.paint();
  }

  /** All with as many channels in a row, so that each is at the same place in all. */
  resize(pixels) {
    const seen = this.frames.filter(({ width, grid }) => width > 0 && grid.channels.length > 0);
    const columns = Math.min(...seen.map(({ width, grid }) => grid.channelsPerRow(width, pixels, this.folded)));
    for (const frame of this.frames) frame.resize(pixels, columns);
  }

  lay(over) {
    this.over = over;
    this.paint();
  }

  get zeros() {
    return this.channels.filter((c) => this.frames.every(({ grid }) => c < grid.maps && grid.allZero(c)));
  }

  outlineZeros(isOn) {
    this.marks = isOn ? this.zeros : [];
    this.paint();
  }

  /** Sort tiles; a folded group shows the first, of maps as drawn one that is all zero and the most varied.
      @param by "drawn", "index", "variance" or the name of a statistic */
  sort(by) {
    const criterion = by === "drawn" && this.folded ? "variance" : by;
    const ranks = criterion === "drawn" ? null : this.ranks(criterion);
    if (criterion !== by) for (const channel of this.zeros.slice(0, 1)) ranks.set(channel, -Infinity);
    for (const { grid } of this.frames) {
      const rank = (slot) => ranks.get(grid.channels[slot]);
      const slots = grid.channels.map((_, slot) => slot);
      if (!ranks || !slots.length) grid.order = null; // nothing to sort in one tile of all channels
      else grid.order = slots.sort((a, b) => rank(a) - rank(b) || a - b).slice(0, this.most);
    }
    this.paint();
  }

  /** By channel, less the larger its statistic is on average; what is no number comes last. */
  ranks(criterion) {
    const ranks = new Map();
    for (const channel of this.channels) {
      ranks.set(channel, criterion === "index" ? channel : this.rank(channel, criterion));
    }
    return ranks;
  }

  rank(channel, criterion) {
    let values = this.frames.map(({ grid }) => grid.stat(channel, criterion === "variance" ? "std" : criterion));
    values = values.filter(Number.isFinite);
    if (criterion === "variance") values = values.map((deviation) => deviation ** 2);
    return values.length ? -values.reduce((sum, value) => sum + value, 0) / values.length : Infinity;
  }
}
