// Owns places: what a spot of an image looks like to a layer, where else it looks so, in this image
// and in the others, and which channels say so. The address keeps the spot: #layer2@0.41,0.63, and
// behind it the number of the image where that is not the page's own.
//
//   PlaceGrid   the places of an image in a layer: shortened vectors of length 1, and channels
//   lens        the panel on the page, and the marks on its maps
//
// It loads the scripts that places.py writes: the index when somebody asks, then those of the images.
"use strict";

const BEST = 9; // places that are shown as crops
const SPOT = /^(.+)@([\d.]+),([\d.]+)(?:,(\d+))?$/;
const bytes = (text, type = Uint8Array) => new type(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);

class PlaceGrid {
  constructor(entry, layer) {
    [this.rows, this.columns] = entry.size;
    this.factor = entry.factor;
    this.field = entry.field;
    this.units = layer.units;
    this.vectors = bytes(entry.vectors, Int8Array);
    this.channels = bytes(entry.channels, layer.channels > 256 ? Uint16Array : Uint8Array);
    this.values = bytes(entry.values, Int8Array);
    this.count = this.rows * this.columns;
    this.lengths = Float32Array.from({ length: this.count }, (_, n) => Math.hypot(...this.vector(n)) || 1);
  }

  /** The coordinates of a place along the shared axes. */
  vector(n) {
    return this.units.map((unit, axis) => unit * this.vectors[n * this.units.length + axis]);
  }

  /** How alike each place is to a vector, -1 to 1. */
  cosines(vector) {
    const length = Math.hypot(...vector) || 1;
    const weights = vector.map((value, axis) => value * this.units[axis] / length);
    return Float32Array.from({ length: this.count }, (_, n) => {
      let sum = 0;
      for (let axis = 0, at = n * weights.length; axis < weights.length; axis++, at++) sum += weights[axis] * this.vectors[at];
      return sum / this.lengths[n];
    });
  }

  /** The place at a spot, and the spot in the middle of a place; both from 0 to 1. */
  at({ x, y }) {
    const [row, column] = [[y, this.rows], [x, this.columns]].map(([share, count]) =>
      Math.min(count - 1, Math.max(0, Math.floor(share * count))));
    return row * this.columns + column;
  }

  middle(n) {
    return { x: (n % this.columns + 0.5) / this.columns, y: (Math.floor(n / this.columns) + 0.5) / this.rows };
  }

  /** Left, top, width and height of what a place sees of an input of this size; null where nobody knows. */
  seen(n, [width, height]) {
    if (!this.field) return null;
    const edges = [[Math.floor(n / this.columns), height, 0], [n % this.columns, width, 3]].map(([place, size, at]) => {
      const [first, last, step] = this.field.slice(at, at + 3);
      const begin = Math.max(0, first + step * place * this.factor);
      return [begin, Math.min(size, last + step * ((place + 1) * this.factor - 1)) - begin];
    });
    const [[top, tall], [left, wide]] = edges;
    return [left, top, wide, tall];
  }
}

/** All similarities in one array, the least one first. */
function sorted(all) {
  const known = all.filter(Boolean);
  const joined = new Float32Array(known.reduce((count, cosines) => count + cosines.length, 0));
  let first = 0;
  for (const cosines of known) {
    joined.set(cosines, first);
    first += cosines.length;
  }
  return joined.sort();
}

const lens = {
  index: null, layer: 0, image: 0, spot: null, pointed: null, asking: false,
  grids: [], loading: new Map(), pictures: [],

  // --- data

  load(script) {
    if (!this.loading.has(script)) {
      const element = make("script", { src: script });
      this.loading.set(script, new Promise((done) => {
        element.onload = () => done(true);
        element.onerror = () => done(false);
      }));
      document.head.append(element);
    }
    return this.loading.get(script);
  },

  async open() {
    if (!await this.load(this.button.dataset.places)) {
      this.button.textContent = "Places are missing: copy the whole report";
      this.button.disabled = true;
      return;
    }
    if (this.index) return;
    const index = window.FEATVIZ_PLACES;
    const page = shownPage();
    if (page.matches(".image") && !index.images.some((image) => image.page === page.id)) {
      this.button.textContent = `Places are known for the first ${index.images.length} images only`;
      this.button.disabled = true;
      return;
    }
    this.index = index;
    this.index.add = (image, entries) => {
      this.grids[image] = entries.map((entry, n) => entry && new PlaceGrid(entry, this.index.layers[n]));
    };
    this.pictures = this.index.images.map(({ input, size: [width, height] }) => make("img", { src: input, width, height, alt: "" }));
    this.build();
  },

  grid(image = this.image, layer = this.layer) { return this.grids[image]?.[layer] ?? null; },

  /** The image of the page, or the first one. */
  get home() {
    return Math.max(0, this.index.images.findIndex(({ page }) => page === shownPage().id));
  },

  nameOf({ name, stem }) { return stem === "output" ? name : `${name}/${stem}`; },

  // --- the panel

  build() {
    const { layers, images } = this.index;
    this.choice = make("select", {}, ...layers.map((layer, n) => make("option", { value: n, textContent: `${this.nameOf(layer)} ${layer.type}` })));
    this.choice.addEventListener("change", () => this.ask(Number(this.choice.value), this.spot));
    const close = make("button", { type: "button", className: "close", textContent: "Close" });
    close.addEventListener("click", () => this.close());
    this.canvas = make("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.input = make("div", { className: "spot", tabIndex: 0 }, this.canvas);
    this.input.setAttribute("role", "application");
    this.input.addEventListener("keydown", (event) => this.key(event));
    this.where = make("figcaption");
    this.crops = make("ol", { className: "crops" });
    this.channels = make("tbody");
    this.thumbs = make("ul", { className: "thumbs" });
    this.note = make("p", { className: "note" });
    const bars = make("table", { className: "bars values" }, make("caption", { textContent: "Channels that stand out here" }), this.channels);
    this.panel = make("section", { className: "places" },
      make("header", { className: "bar" }, make("h2", { textContent: "Places like this one" }), make("label", {}, "Layer ", this.choice), close),
      make("div", { className: "asked" }, make("figure", {}, this.input, this.where),
        make("div", {}, make("h3", { textContent: "Most similar places" }), this.crops), bars),
      make("h3", { textContent: "In the other images", hidden: images.length < 2 }), this.thumbs, this.note);
    this.panel.setAttribute("aria-label", "Places");
  },

  key(event) {
    const grid = this.grid();
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") this.close();
    if (!step || !grid) return;
    event.preventDefault();
    event.stopPropagation();
    const { x, y } = grid.middle(grid.at(this.spot));
    const inside = (share) => Math.min(0.9999, Math.max(0, share));
    this.ask(this.layer, { x: inside(x + step[0] / grid.columns), y: inside(y + step[1] / grid.rows) });
  },

  async toggle() {
    if (this.asking) this.close();
    else await this.ask(null, { x: 0.5, y: 0.5 });
  },

  close() {
    this.asking = false;
    this.spot = this.pointed = null;
    this.button.setAttribute("aria-pressed", "false");
    this.panel.remove();
    state.write("");
    this.mark();
    this.button.focus();
  },

  /** Show what a layer makes of a spot; null takes the page's own layer, or that of most channels. */
  async ask(layer, spot, image = null) {
    await this.open();
    if (!this.index) return;
    const { layers, images } = this.index;
    const usable = (n) => !layers[n].reason;
    if (image !== null) this.image = image;
    else if (!this.asking) this.image = this.home;
    if (layer !== null) this.layer = layer;
    else {
      const own = layers.findIndex(({ page }, n) => page === shownPage().id && usable(n));
      const most = layers.reduce((best, { channels }, n) => (channels >= layers[best].channels ? n : best), 0);
      this.layer = own >= 0 ? own : most;
    }
    const was = this.asking;
    this.asking = true;
    this.spot = spot;
    this.button.setAttribute("aria-pressed", "true");
    if (!was) shownPage().querySelector("header").after(this.panel);
    await this.load(images[this.image].script);
    this.show();
    if (!was) this.input.focus();
    const others = images.map(({ script }) => script).filter((script) => !this.loading.has(script));
    if (!others.length) return;
    await Promise.all(others.map((script) => this.load(script)));
    if (this.asking) this.show();
  },

  show() {
    const { layers, images, left_out: left } = this.index;
    const layer = layers[this.layer];
    const grid = this.grid();
    const { x, y } = this.spot;
    const number = this.image === this.home ? "" : `,${this.image}`;
    state.write(`#${encodeURIComponent(this.nameOf(layer))}@${x.toFixed(2)},${y.toFixed(2)}${number}`);
    this.choice.value = this.layer;
    const query = grid?.vector(grid.at(this.spot));
    this.cosines = images.map((_, n) => grid && this.grid(n)?.cosines(query));
    this.sorted = sorted(this.cosines);
    const usual = this.sorted[this.sorted.length >> 1] ?? 0; // of most places, which stay dark
    this.light = (cosine) => Math.max(0, (cosine - usual) / Math.max(1e-6, 1 - usual));
    this.draw(this.canvas, this.image, 320, grid);
    const name = images[this.image].name;
    this.where.replaceChildren(make("a", { href: images[this.image].address, textContent: name }));
    this.input.setAttribute("aria-label", `${name} with places like the one at ${x.toFixed(2)}, ${y.toFixed(2)}. Arrow keys move.`);
    this.showCrops(grid);
    this.showChannels(layer, grid);
    cancelAnimationFrame(this.later); // the answer itself comes first
    this.later = requestAnimationFrame(() => this.asking && this.showThumbs());
    const missing = layer.reason || (grid ? "" : "this image has none");
    this.note.textContent = missing ? `${layer.name} has no places to compare: ${missing}.`
      : `Cosines of all ${layer.channels} channels, from ${layer.units.length} shared components: at most ${layer.error} off in 500 random pairs.`
      + (grid.factor > 1 ? ` ${grid.factor}×${grid.factor} values are averaged into a place.` : "")
      + (grid.field ? "" : " What a place sees of the input is not known.")
      + (left ? ` Of ${images.length + left} images, the first ${images.length} are compared.` : "");
    announce(this.note.textContent);
    this.mark();
  },

  /** An image with its similar places in light; with its spot where that is known. */
  draw(canvas, image, most, grid) {
    const picture = this.pictures[image];
    if (!picture.complete) picture.addEventListener("load", () => this.asking && this.draw(canvas, image, most, grid), { once: true });
    const [width, height] = this.index.images[image].size;
    const zoom = most / Math.max(width, height);
    Object.assign(canvas, { width: Math.max(1, Math.round(width * zoom)), height: Math.max(1, Math.round(height * zoom)) });
    const pen = canvas.getContext("2d");
    if (picture.complete && picture.naturalWidth) pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
    const cosines = this.cosines[image];
    if (!cosines) return;
    const places = this.grid(image);
    const heat = new ImageData(places.columns, places.rows);
    const colors = new Uint32Array(heat.data.buffer); // opacity, blue, green, red
    cosines.forEach((cosine, n) => { colors[n] = ((235 * this.light(cosine) ** 2) << 24 | 0x0096ff) >>> 0; });
    const small = make("canvas", { width: places.columns, height: places.rows });
    small.getContext("2d").putImageData(heat, 0, 0);
    pen.fillStyle = "rgba(0, 0, 0, 0.45)";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(small, 0, 0, canvas.width, canvas.height);
    const n = grid ? grid.at(this.spot) : this.best(image);
    const seen = grid?.seen(n, [width, height]);
    if (seen) stroke(pen, (p) => p.strokeRect(...seen.map((side) => side * zoom)));
    const { x, y } = places.middle(n);
    stroke(pen, (p) => { p.beginPath(); p.arc(x * canvas.width, y * canvas.height, grid ? 5 : 3, 0, 7); p.stroke(); });
  },

  best(image) { return this.cosines[image].reduce((best, cosine, n, all) => (cosine > all[best] ? n : best), 0); },

  /** A button that asks for a place of an image. */
  leading(image, n, ...children) {
    const button = make("button", { type: "button" }, ...children);
    button.addEventListener("click", () => this.ask(this.layer, this.grid(image).middle(n), image));
    return button;
  },

  /** The most similar places, no two of them neighbours. */
  nearest() {
    // each of them takes the places of at most eight neighbours
    const least = this.sorted[Math.max(0, this.sorted.length - 9 * BEST)];
    const near = [];
    this.cosines.forEach((cosines, image) => cosines?.forEach((cosine, n) => {
      if (cosine >= least) near.push({ cosine, image, n });
    }));
    const chosen = [];
    for (const place of near.sort((a, b) => b.cosine - a.cosine)) {
      const { columns } = this.grid(place.image);
      const apart = ({ image, n }) => image !== place.image
        || Math.max(Math.abs(n % columns - place.n % columns), Math.abs(Math.floor(n / columns) - Math.floor(place.n / columns))) > 1;
      if (chosen.every(apart)) chosen.push(place);
      if (chosen.length === BEST) break;
    }
    return chosen;
  },

  showCrops(grid) {
    this.crops.replaceChildren(...(grid ? this.nearest() : []).map(({ cosine, image, n }) => {
      const { size: [width, height], name } = this.index.images[image];
      const { x, y } = this.grid(image).middle(n);
      const side = Math.min(width, height, Math.max(width, height) / 4);
      const left = Math.min(width - side, Math.max(0, x * width - side / 2));
      const top = Math.min(height - side, Math.max(0, y * height - side / 2));
      const crop = cut(this.pictures[image], [left, top, side, side], 88, `A place of ${name}`);
      return make("li", {}, this.leading(image, n, crop, make("small", { textContent: cosine.toFixed(2) })));
    }));
  },

  showThumbs() {
    const shown = this.index.images.map((_, n) => n).filter((n) => n !== this.image && this.cosines[n]);
    this.thumbs.replaceChildren(...shown.map((n) => {
      const canvas = make("canvas");
      this.draw(canvas, n, 88, null);
      const button = this.leading(n, this.best(n), canvas, make("small", { textContent: this.index.images[n].name }));
      return make("li", {}, button);
    }));
  },

  showChannels(layer, grid) {
    const shown = Math.min(8, layer.channels);
    const first = grid ? grid.at(this.spot) * shown : 0;
    const most = grid ? Math.max(1, Math.abs(grid.values[first])) : 1;
    this.channels.replaceChildren(...Array.from({ length: grid ? shown : 0 }, (_, n) => {
      const [channel, tenths] = [grid.channels[first + n], grid.values[first + n]];
      const length = 50 * Math.abs(tenths) / most;
      const bar = draw("svg", { class: "meter", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
        draw("rect", { class: "part", x: tenths < 0 ? 50 - length : 50, width: length, height: 8 }));
      const head = make("th", { scope: "row" }, make("a", { href: layer.spot.replace(/0$/, channel), textContent: channel }));
      return make("tr", {}, head, make("td", {}, bar), make("td", { className: "n", textContent: `${digits(tenths / 10)} σ` }));
    }));
  },

  // --- marks on the maps of the page

  /** The spot that maps of the page show, if they are of the lens's image. */
  get marked() {
    if (!this.asking) return null;
    return this.pointed ?? (shownPage().matches(".layer") || this.image === this.home ? this.spot : null);
  },

  mark() {
    const spot = this.marked;
    document.querySelectorAll(".strip circle").forEach((circle) => circle.remove());
    for (const map of spot ? shownPage().querySelectorAll(".strip[data-scene] > * svg, .strip[data-scene] > svg") : []) {
      const [x, y, width, height] = map.getAttribute("viewBox").split(" ").map(Number);
      for (const name of ["rim", "dot"]) {
        map.append(draw("circle", { class: name, cx: x + spot.x * width, cy: y + spot.y * height, r: Math.min(width, height) / 14 }));
      }
    }
    for (const frame of frames.values()) if (frame.visible) frame.paint();
  },

  /** Where a map or input of the page is pointed at: the spot, and its image and layer. */
  under({ target, clientX, clientY }) {
    const share = (box, left = 0, top = 0, width = box.width, height = box.height) =>
      ({ x: (clientX - box.left - left) / width, y: (clientY - box.top - top) / height });
    const frame = frames.get(target.closest?.(".frame"));
    const map = target.closest?.(".strip[data-scene] svg");
    const owner = target.closest?.("[data-layer]");
    const layer = owner ? this.index.layers.findIndex(({ spot }) => spot === owner.dataset.spot) : this.layer;
    let spot = null;
    let image = this.home;
    if (frame?.grid.scene) {
      spot = frame.spotAt(clientX, clientY);
      image = this.index.images.findIndex(({ name }) => name === frame.element.dataset.name);
    } else if (map) spot = share(map.getBoundingClientRect());
    else if (target.matches?.(".seen img")) { // contained, at the upper left
      const box = target.getBoundingClientRect();
      const zoom = Math.min(box.width / target.naturalWidth, box.height / target.naturalHeight);
      spot = share(box, 0, 0, target.naturalWidth * zoom, target.naturalHeight * zoom);
    } else if (target.closest?.(".spot")) {
      spot = share(this.canvas.getBoundingClientRect());
      image = this.image;
    }
    const inside = spot && Math.min(spot.x, spot.y) >= 0 && Math.max(spot.x, spot.y) < 1;
    return inside && layer >= 0 && image >= 0 ? { spot, image, layer } : null;
  },

  pointAt(event) {
    if (!this.asking || !this.index) return;
    const at = this.under(event);
    const spot = at?.spot ?? null;
    if (!spot && !this.pointed) return;
    this.pointed = spot;
    cancelAnimationFrame(this.waiting);
    this.waiting = requestAnimationFrame(() => this.mark());
  },

  click(event) {
    const at = this.asking && this.under(event);
    if (!at) return;
    event.preventDefault();
    event.stopPropagation();
    this.pointed = null;
    this.ask(at.layer, at.spot, at.image);
  },

  /** Ask for the spot that the address names. */
  async route() {
    const asked = SPOT.exec(decodeURIComponent(location.hash.slice(1)));
    if (!asked || !this.button) return;
    await this.open();
    if (!this.index) return;
    const layer = this.index.layers.findIndex((one) => this.nameOf(one) === asked[1]);
    const image = asked[4] === undefined ? this.home : Number(asked[4]);
    const spot = { x: Number(asked[2]), y: Number(asked[3]) };
    const known = layer >= 0 && image in this.index.images && spot.x <= 1 && spot.y <= 1;
    if (known) return this.ask(layer, spot, image);
    await this.ask(null, { x: 0.5, y: 0.5 });
    this.note.textContent = `This report has no place ${asked[0]}. ${this.note.textContent}`;
  },

  begin() {
    this.button = document.querySelector("[data-places]");
    if (!this.button) return;
    this.button.addEventListener("click", () => this.toggle());
    document.addEventListener("pointermove", (event) => this.pointAt(event));
    document.addEventListener("click", (event) => this.click(event), true);
    addEventListener("hashchange", () => this.route());
    addEventListener("load", () => this.route());
  },
};

/** Lines with a dark edge, which are seen on every ground. */
function stroke(pen, lines) {
  for (const [ink, width] of [["#000000", 4], ["#6cc0ff", 2]]) {
    Object.assign(pen, { strokeStyle: ink, lineWidth: width });
    lines(pen);
  }
}

lens.begin();
