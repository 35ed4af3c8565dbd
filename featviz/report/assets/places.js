// Owns places: what a spot of an image looks like to a layer, where else it looks so, in this image
// and in the others, and which channels say so. The address keeps the spot: #layer2@0.41,0.63, and
// behind it the number of the image where that is not the page's own.
//
//   PlaceGrid    the places of an image in a layer: shortened vectors of length 1, and channels
//   Answer       how like one place all places of the images are
//   PlacePanel   what the page shows of an answer
//   lens         what is asked, the scripts with the data, and the marks on the maps of the page
//
// A spot is {x, y}: shares of the width and height of an image, 0 to 1. A place is the number of a
// vector in its grid, row by row. The data are in scripts that places.py writes: the index comes when
// somebody asks, then the image of the page, then those that all images are compared with. A page
// without these data is without this file.
"use strict";

const CROPS = 9; // places that are shown as crops
const CROPS_OF_IMAGE = 3; // of these, at most, where the images suffice
const STANDING_OUT = 10; // tenths of a standard deviation from the mean, from which on a channel is named
const SHOWN_CHANNELS = 8; // of a place, as places.py writes them
const SMALL_SIDE = 88; // pixels of the longer side of a thumbnail, and of the height of a crop
const LARGE_SIDE = 320; // pixels of the longer side of the image that is asked
const MIDDLE = { x: 0.5, y: 0.5 };
const SPOT_ADDRESS = /^(.+)@([\d.]+),([\d.]+)(?:,(\d+))?$/;

class PlaceGrid {
  /** @param entry the places of an image in a layer, as places.py writes them
      @param layer of the index */
  constructor(entry, layer) {
    const [rows, columns] = entry.size;
    this.rows = rows;
    this.columns = columns;
    this.count = rows * columns;
    this.factor = entry.factor; // rows, and columns, of the map that were averaged into a place
    this.field = entry.field; // [first, last, step] of rows and of columns; null where nobody knows
    this.units = layer.units; // what 1 stands for along each axis
    this.vectors = decoded(entry.vectors, Int8Array);
    this.channels = decoded(entry.channels, layer.channels > 256 ? Uint16Array : Uint8Array);
    this.values = decoded(entry.values, Int8Array); // tenths of a standard deviation
  }

  /** The coordinates of a place along the shared axes. */
  vector(place) {
    const first = place * this.units.length;
    return this.units.map((unit, axis) => unit * this.vectors[first + axis]);
  }

  /** The lengths of all vectors along the axes, not 0; computed when they are first needed. */
  get lengths() {
    this.knownLengths ??= Float32Array.from({ length: this.count }, (_, place) => lengthOf(this.vector(place)));
    return this.knownLengths;
  }

  /** How like a vector each place is, -1 to 1: `shortened_cosines` of places.py. */
  cosines(vector) {
    const axes = this.units.length;
    const length = lengthOf(vector);
    const weights = vector.map((value, axis) => value * this.units[axis]);
    const { vectors, lengths } = this;
    const cosines = new Float32Array(this.count);
    for (let place = 0; place < this.count; place++) {
      let product = 0;
      for (let axis = 0; axis < axes; axis++) product += weights[axis] * vectors[place * axes + axis];
      const inside = Math.max(0, product / (length * lengths[place]));
      const cosine = product + inside ** 8 * outside(length) * outside(lengths[place]);
      cosines[place] = Math.min(1, cosine); // eight bits may make a vector longer than 1
    }
    return cosines;
  }

  row(place) { return Math.floor(place / this.columns); }

  column(place) { return place % this.columns; }

  /** The place at a spot. */
  at({ x, y }) {
    const row = clamp(Math.floor(y * this.rows), 0, this.rows - 1);
    const column = clamp(Math.floor(x * this.columns), 0, this.columns - 1);
    return row * this.columns + column;
  }

  /** The spot in the middle of a place. */
  middle(place) {
    return { x: (this.column(place) + 0.5) / this.columns, y: (this.row(place) + 0.5) / this.rows };
  }

  /** A place and those that touch it. */
  around(place) {
    const places = [];
    for (let row = Math.max(0, this.row(place) - 1); row <= Math.min(this.rows - 1, this.row(place) + 1); row++) {
      const first = Math.max(0, this.column(place) - 1);
      const last = Math.min(this.columns - 1, this.column(place) + 1);
      for (let column = first; column <= last; column++) places.push(row * this.columns + column);
    }
    return places;
  }

  /** The receptive field of a place: left, top, width and height in an input of the size [width,
      height]; null where nobody knows. */
  seen(place, [width, height]) {
    if (!this.field) return null;
    const rows = this.interval(this.row(place), this.field.slice(0, 3), height);
    const columns = this.interval(this.column(place), this.field.slice(3), width);
    return [columns.begin, rows.begin, columns.length, rows.length];
  }

  /** The pixels that a row or column of places sees, cut at the edges of the input.
      @param line its number
      @param size of the input in that direction */
  interval(line, [first, last, step], size) {
    const begin = Math.max(0, first + step * line * this.factor);
    const end = Math.min(size, last + step * ((line + 1) * this.factor - 1));
    return { begin, length: end - begin };
  }
}

const lengthOf = (vector) => Math.hypot(...vector) || 1;
/** The length of what lies outside the axes, of a vector whose whole length is 1. */
const outside = (length) => Math.sqrt(Math.max(0, 1 - length ** 2));

/** How like one place all places of the images are. */
class Answer {
  /** @param grids of the images, null for one without data
      @param image the number of the one that is asked
      @param place that is asked of it */
  constructor(grids, image, place) {
    this.grids = grids;
    this.image = image;
    this.place = place;
    const vector = grids[image].vector(place);
    this.cosines = grids.map((grid) => (grid ? grid.cosines(vector) : null));
    const sorted = Float32Array.from(this.cosines.filter(Boolean).flatMap((cosines) => [...cosines])).sort();
    this.usual = sorted[sorted.length >> 1] ?? 0; // of most places, which stay dark
  }

  /** How bright a place of this cosine is, 0 to 1. */
  light(cosine) {
    return Math.max(0, (cosine - this.usual) / Math.max(1e-6, 1 - this.usual));
  }

  /** The most similar place of an image. */
  best(image) {
    return highest(this.cosines[image]);
  }

  /** The places most similar to the one that is asked, which touch neither it nor one another: records
      of image, place and cosine. No image has more than its share, so that some of others are seen. */
  nearest(count) {
    const images = this.cosines.filter(Boolean).length;
    const share = Math.max(CROPS_OF_IMAGE, Math.ceil(count / images));
    const near = [];
    this.cosines.forEach((cosines, image) => {
      if (!cosines) return;
      const left = Float32Array.from(cosines); // -2 where a place is taken, or touches one
      const take = (place) => this.grids[image].around(place).forEach((other) => { left[other] = -2; });
      if (image === this.image) take(this.place);
      for (let taken = 0; taken < share; taken++) {
        const place = highest(left);
        if (left[place] < -1) break;
        near.push({ image, place, cosine: left[place] });
        take(place);
      }
    });
    return near.sort((a, b) => b.cosine - a.cosine).slice(0, count);
  }
}

/** The position of the largest value. */
function highest(values) {
  return values.indexOf(values.reduce((high, value) => Math.max(high, value)));
}

// ---------------------------------------------------------------------------------------------
// The panel

const layerName = ({ name, stem }) => (stem.startsWith("output") ? name + stem.slice(6) : `${name}/${stem}`);
const layerKey = ({ name, stem }) => (stem === "output" ? name : `${name}/${stem}`); // in the address, of one layer alone

class PlacePanel {
  /** @param index as places.py writes it: layers, images and how many of these are compared */
  constructor(index) {
    this.index = index;
    this.pictures = []; // of the images, loaded when they are first drawn
    this.choice = make("select", {}, ...index.layers.flatMap((layer, number) => (layer.stand_in === null
      ? make("option", { value: number, textContent: `${layerName(layer)} ${layer.type}` }) : [])));
    this.closing = make("button", { type: "button", className: "close", textContent: "Close" });
    this.canvas = make("canvas", { ariaHidden: "true" });
    this.input = make("div", { className: "spot", tabIndex: 0 }, this.canvas);
    this.input.setAttribute("role", "application");
    this.caption = make("figcaption");
    this.crops = make("ol", { className: "crops" });
    this.channels = make("tbody");
    this.channelsNote = make("caption");
    this.standIn = make("p");
    this.thumbs = make("ul", { className: "thumbs" });
    this.note = make("p", { className: "note" });
    this.element = this.arranged();
    this.listen();
  }

  arranged() {
    const head = make("header", { className: "bar" }, make("h2", { textContent: "Places like this one" }),
      make("label", {}, "Layer ", this.choice), this.closing);
    const crops = make("div", {}, make("h3", { textContent: "Most similar places" }), this.crops);
    const bars = make("table", { className: "bars values" }, this.channelsNote, this.channels);
    const asked = make("div", { className: "asked" }, make("figure", {}, this.input, this.caption), crops, bars);
    const rest = make("h3", { textContent: "In the other images", hidden: this.index.images.length < 2 });
    const element = make("section", { className: "places" }, head, this.standIn, asked, rest, this.thumbs, this.note);
    element.setAttribute("aria-label", "Places");
    return element;
  }

  listen() {
    this.choice.addEventListener("change", () => lens.ask({ layer: Number(this.choice.value), spot: lens.spot }));
    this.closing.addEventListener("click", () => lens.close());
    this.input.addEventListener("keydown", (event) => lens.key(event));
  }

  /** Show what the lens knows: the image, crops and channels at once, thumbnails afterwards. */
  show() {
    const { name, address } = this.index.images[lens.image];
    const { x, y } = lens.spot;
    this.choice.value = lens.layer;
    this.draw(this.canvas, lens.image, LARGE_SIDE, lens.answer ? lens.grid().at(lens.spot) : null);
    this.caption.replaceChildren(make("a", { href: address, textContent: name }));
    const where = `${x.toFixed(2)}, ${y.toFixed(2)}`;
    this.input.setAttribute("aria-label", `${name} with places like the one at ${where}. Arrow keys move.`);
    this.showCrops();
    this.showChannels();
    cancelAnimationFrame(this.waiting);
    this.waiting = requestAnimationFrame(() => lens.asking && this.showThumbs());
    const asked = this.index.layers[lens.asked];
    const layer = this.index.layers[lens.layer];
    const answers = `${layerName(asked)} has no places of its own: ${layerName(layer)} answers.`;
    this.standIn.textContent = asked === layer ? "" : answers;
    this.note.textContent = this.noteOf(layer);
    announce(`${this.standIn.textContent} ${this.note.textContent}`);
  }

  /** What is known of the answer of a layer: its error, or why there is none. */
  noteOf(layer) {
    const grid = lens.grid();
    const { images, compared } = this.index;
    const sentences = [];
    if (!grid) return `${layerName(layer)} has no places to compare: ${layer.reason || "this image has none"}.`;
    sentences.push(`The numbers say how alike two places are to the ${layer.channels} channels: 1 is the same, 0 unlike`
      + ` (cosine similarity, right to about ${layer.error}).`);
    if (grid.factor > 1) sentences.push(`A place is the mean of ${grid.factor}×${grid.factor} values of the map.`);
    if (!grid.field) sentences.push(this.missingField());
    if (compared < images.length) sentences.push(`Of ${images.length} images, the first ${compared} are compared.`);
    return sentences.join(" ");
  }

  /** Why there is no box of what a place sees of the input. */
  missingField() {
    if (this.index.images.some((_, image) => lens.grid(image)?.field)) {
      return "No box shows what a place sees: that is known of images of the first one’s size alone.";
    }
    return "No box shows what a place sees: it could not be worked out for this layer. “featviz field” measures it.";
  }

  /** The picture of what the model saw of an image. */
  picture(image) {
    const { input, size: [width, height] } = this.index.images[image];
    this.pictures[image] ??= make("img", { src: input, width, height, alt: "" });
    return this.pictures[image];
  }

  /** Draw an image with its similar places in light.
      @param side pixels of its longer side
      @param place to be marked with its receptive field; null marks the most similar one */
  draw(canvas, image, side, place) {
    const picture = this.picture(image);
    if (!picture.complete) {
      const again = () => lens.asking && this.draw(canvas, image, side, place);
      picture.addEventListener("load", again, { once: true });
    }
    const { size } = this.index.images[image];
    const zoom = side / Math.max(...size);
    canvas.width = Math.max(1, Math.round(size[0] * zoom));
    canvas.height = Math.max(1, Math.round(size[1] * zoom));
    const pen = canvas.getContext("2d");
    if (picture.complete && picture.naturalWidth) pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
    if (!lens.answer?.cosines[image]) return;
    this.drawLight(pen, image);
    const grid = lens.grid(image);
    const field = place === null ? null : grid.seen(place, size);
    if (field) stroke(pen, ACTIVE, 2, () => pen.strokeRect(...field.map((pixels) => pixels * zoom)));
    const { x, y } = grid.middle(place ?? lens.answer.best(image));
    const radius = place === null ? 3 : 5;
    stroke(pen, ACTIVE, 2, () => {
      pen.beginPath();
      pen.arc(x * canvas.width, y * canvas.height, radius, 0, 2 * Math.PI);
      pen.stroke();
    });
  }

  /** Darken a picture, and light up its places by their cosines. */
  drawLight(pen, image) {
    const { rows, columns } = lens.grid(image);
    const { width, height } = pen.canvas;
    const light = new ImageData(columns, rows);
    const colors = new Uint32Array(light.data.buffer); // from the highest byte: opacity, blue, green, red
    lens.answer.cosines[image].forEach((cosine, place) => {
      const opacity = 235 * lens.answer.light(cosine) ** 2;
      colors[place] = ((opacity << 24) | 0x0096ff) >>> 0;
    });
    const small = make("canvas", { width: columns, height: rows });
    small.getContext("2d").putImageData(light, 0, 0);
    pen.fillStyle = "rgba(0, 0, 0, 0.45)";
    pen.fillRect(0, 0, width, height);
    pen.drawImage(small, 0, 0, width, height);
  }

  /** A button that asks for a place of an image. */
  leading(image, place, ...children) {
    const button = make("button", { type: "button" }, ...children);
    button.addEventListener("click", () => lens.ask({ layer: lens.asked, spot: lens.grid(image).middle(place), image }));
    return button;
  }

  showCrops() {
    const nearest = lens.answer ? lens.answer.nearest(CROPS) : [];
    this.crops.replaceChildren(...nearest.map(({ image, place, cosine }) => {
      const { size: [width, height], name } = this.index.images[image];
      const { x, y } = lens.grid(image).middle(place);
      const side = Math.min(width, height, Math.max(width, height) / 4);
      const left = clamp(x * width - side / 2, 0, width - side);
      const top = clamp(y * height - side / 2, 0, height - side);
      const crop = cut(this.picture(image), [left, top, side, side], SMALL_SIDE, `A place of ${name}`);
      return make("li", {}, this.leading(image, place, crop, make("small", { textContent: cosine.toFixed(2) })));
    }));
  }

  showThumbs() {
    const thumbs = [];
    this.index.images.forEach(({ name }, image) => {
      if (image === lens.image || !lens.answer?.cosines[image]) return;
      const canvas = make("canvas");
      this.draw(canvas, image, SMALL_SIDE, null);
      const caption = make("small", { textContent: name });
      thumbs.push(make("li", {}, this.leading(image, lens.answer.best(image), canvas, caption)));
    });
    this.thumbs.replaceChildren(...thumbs);
  }

  /** The channels that stand out at the place, a standard deviation or more, with bars to both sides of
      their mean. */
  showChannels() {
    const layer = this.index.layers[lens.layer];
    const grid = lens.grid();
    const rows = [];
    const count = grid ? Math.min(SHOWN_CHANNELS, layer.channels) : 0;
    const first = grid ? grid.at(lens.spot) * count : 0;
    const longest = grid ? Math.max(1, Math.abs(grid.values[first])) : 1; // the first is the farthest
    for (let at = first; at < first + count; at++) {
      const channel = grid.channels[at];
      const tenths = grid.values[at];
      if (Math.abs(tenths) < STANDING_OUT) break; // as do those behind it
      const width = (50 * Math.abs(tenths)) / longest;
      const bar = draw("svg", { class: "meter", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
        draw("rect", { class: "part", x: tenths < 0 ? 50 - width : 50, width, height: 8 }));
      const link = make("a", { href: channelAddress(layer.spot, channel), textContent: channel });
      const value = make("td", { className: "n", textContent: `${digits(tenths / 10)} σ` });
      rows.push(make("tr", {}, make("th", { scope: "row" }, link), make("td", {}, bar), value));
    }
    this.channels.replaceChildren(...rows);
    this.channelsNote.textContent = rows.length ? "Channels that stand out here"
      : "No channel stands out here: all are less than one standard deviation from their means.";
  }
}

// ---------------------------------------------------------------------------------------------
// What is asked

const lens = {
  button: document.querySelector("[data-places]"),
  asking: false, // whether the panel is open
  index: null, // of the report, once it has come
  panel: null,
  grids: [], // of each image whose script has come, one for each layer or null
  loading: new Map(), // whether each script has come, by its name
  asked: 0, // the layer that was asked
  layer: 0, // the one that answers for it
  image: 0,
  spot: null,
  answer: null, // null where the image has no places in the layer

  // --- data

  /** Load a script, once; whether it came. */
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

  /** Load the index, and build the panel. */
  async open() {
    const hasCome = await this.load(this.button.dataset.places);
    if (this.index) return;
    const index = window.FEATVIZ_PLACES;
    if (!hasCome || !index.layers.length) {
      this.button.textContent = hasCome ? "No layer has places" : "Places are missing: copy the whole report";
      this.button.disabled = true;
      return;
    }
    this.index = index;
    this.index.add = (image, entries) => {
      this.grids[image] = entries.map((entry, layer) => entry && new PlaceGrid(entry, this.index.layers[layer]));
    };
    this.panel = new PlacePanel(this.index);
  },

  /** The places of an image in the layer; null where there are none, or before they have come. */
  grid(image = this.image) {
    return this.grids[image]?.[this.layer] ?? null;
  },

  /** The image of the page, or the first one. */
  get home() {
    const page = shownPage().id;
    return Math.max(0, this.index.images.findIndex((image) => image.page === page));
  },

  /** The layer of the page, or the one of most channels. */
  get homeLayer() {
    const { layers } = this.index;
    const page = shownPage().id;
    const own = layers.findIndex((layer) => layer.page === page && !layer.reason);
    if (own >= 0) return own;
    const channels = layers.map((layer) => layer.channels);
    return channels.lastIndexOf(Math.max(...channels));
  },

  // --- asking

  /** Show what a layer makes of a spot.
      @param layer its number; null for that of the page
      @param image its number; null for the one that was asked before, or that of the page */
  async ask({ layer = null, spot, image = null }) {
    await this.open();
    if (!this.index) return;
    const isFirst = !this.asking;
    if (isFirst) this.image = this.home;
    if (image !== null) this.image = image;
    this.asked = layer ?? this.homeLayer;
    this.layer = this.index.layers[this.asked].stand_in ?? this.asked;
    this.spot = spot;
    this.asking = true;
    this.button.setAttribute("aria-pressed", "true");
    if (isFirst) shownPage().querySelector("header").after(this.panel.element);
    const { images, compared } = this.index;
    await this.load(images[this.image].script);
    this.show();
    // a crop or thumbnail that was clicked is gone, and keys with it
    if (isFirst || image !== null) this.panel.input.focus();
    // the image itself has answered; then come all others at once
    const waiting = images.slice(0, compared).filter(({ script }) => !this.loading.has(script));
    if (!waiting.length) return;
    await Promise.all(waiting.map(({ script }) => this.load(script)));
    if (this.asking) this.show();
  },

  show() {
    const { layers, images } = this.index;
    const grid = this.grid();
    this.answer = grid ? new Answer(images.map((_, image) => this.grid(image)), this.image, grid.at(this.spot)) : null;
    const { x, y } = this.spot;
    const number = this.image === this.home ? "" : `,${this.image}`;
    state.write(`#${encodeURIComponent(layerKey(layers[this.asked]))}@${x.toFixed(2)},${y.toFixed(2)}${number}`);
    this.panel.show();
    this.mark(this.spot);
  },

  /** Ask for the spot that the address names. */
  async route() {
    const parts = SPOT_ADDRESS.exec(decodeURIComponent(location.hash.slice(1)));
    if (!parts) return;
    await this.open();
    if (!this.index) return;
    const [address, name, x, y, number] = parts;
    const layer = this.index.layers.findIndex((other) => layerKey(other) === name);
    const image = number === undefined ? this.home : Number(number);
    const spot = { x: Number(x), y: Number(y) };
    if (layer >= 0 && image in this.index.images && spot.x <= 1 && spot.y <= 1) {
      await this.ask({ layer, spot, image });
      return;
    }
    await this.ask({ spot: MIDDLE });
    this.panel.note.textContent = `This report has no place ${address}. ${this.panel.note.textContent}`;
  },

  close() {
    this.asking = false;
    this.button.setAttribute("aria-pressed", "false");
    this.panel.element.remove();
    state.write("");
    this.mark(null);
    this.button.focus();
  },

  /** Move to the neighbouring place, or close the panel. */
  key(event) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const grid = this.grid();
    if (event.key === "Escape") this.close();
    if (!(event.key in steps) || !grid) return;
    event.preventDefault();
    event.stopPropagation(); // arrows go to the next channel elsewhere
    const [right, down] = steps[event.key];
    const place = grid.at(this.spot);
    const row = clamp(grid.row(place) + down, 0, grid.rows - 1);
    const column = clamp(grid.column(place) + right, 0, grid.columns - 1);
    this.ask({ layer: this.asked, spot: grid.middle(row * grid.columns + column) });
  },

  // --- the maps of the page

  /** Mark a spot in all maps of the page; null takes the marks away. A spot of another image is not
      marked on the page of an image, whose maps do not show it. */
  mark(spot) {
    const isHere = spot && (shownPage().matches(".layer") || this.image === this.home || spot !== this.spot);
    marked.spot = isHere ? spot : null;
    document.querySelectorAll(".strip circle").forEach((circle) => circle.remove());
    const maps = marked.spot ? shownPage().querySelectorAll(".strip[data-scene] svg") : [];
    for (const map of maps) {
      const [left, top, width, height] = map.getAttribute("viewBox").split(" ").map(Number);
      const cx = left + spot.x * width;
      const cy = top + spot.y * height;
      const r = Math.min(width, height) / 14;
      map.append(draw("circle", { class: "rim", cx, cy, r }), draw("circle", { class: "dot", cx, cy, r }));
    }
    for (const frame of frames.values()) if (frame.visible) frame.paint();
  },

  /** The spot of a map or input that is pointed at, with its image and layer as `ask` takes them;
      null elsewhere. */
  under(event) {
    const { target } = event;
    if (!(target instanceof Element)) return null;
    const frame = frames.get(target.closest(".frame"));
    const map = target.closest(".strip[data-scene] svg");
    let image = this.home;
    let spot = null;
    if (frame?.grid.scene) {
      spot = frame.spotAt(event);
      image = this.index.images.findIndex(({ name }) => name === frame.element.dataset.name);
    } else if (map) {
      spot = spotIn(map.getBoundingClientRect(), event);
    } else if (target.matches(".seen img")) {
      spot = spotIn(containedBox(target), event);
    } else if (target.closest(".spot")) {
      spot = spotIn(this.panel.canvas.getBoundingClientRect(), event);
      image = this.image;
    }
    const owner = target.closest("[data-layer]");
    const layer = owner ? this.index.layers.findIndex((other) => other.spot === owner.dataset.spot) : this.asked;
    const isInside = spot && Math.min(spot.x, spot.y) >= 0 && Math.max(spot.x, spot.y) < 1;
    return isInside && layer >= 0 && image >= 0 ? { layer, spot, image } : null;
  },

  /** Let the marks follow the pointer; they return when it leaves the maps. */
  point(event) {
    if (!this.asking) return;
    const spot = this.under(event)?.spot ?? this.spot;
    if (spot === this.pointed) return;
    this.pointed = spot;
    cancelAnimationFrame(this.waiting);
    this.waiting = requestAnimationFrame(() => this.asking && this.mark(spot));
  },

  click(event) {
    const question = this.asking ? this.under(event) : null;
    if (!question) return;
    event.preventDefault();
    event.stopPropagation(); // what is a link otherwise asks for a place
    this.ask(question);
  },

  begin() {
    this.button.addEventListener("click", () => (this.asking ? this.close() : this.ask({ spot: MIDDLE })));
    document.addEventListener("pointermove", (event) => this.point(event));
    document.addEventListener("click", (event) => this.click(event), true);
    addEventListener("hashchange", () => this.route());
    addEventListener("load", () => this.route());
  },
};

/** Where a pointer is in a box of the window, as a spot. */
function spotIn({ left, top, width, height }, { clientX, clientY }) {
  return { x: (clientX - left) / width, y: (clientY - top) / height };
}

/** The box of a picture that is contained in its element, at the upper left. */
function containedBox(image) {
  const { left, top, width, height } = image.getBoundingClientRect();
  const zoom = Math.min(width / image.naturalWidth, height / image.naturalHeight);
  return { left, top, width: image.naturalWidth * zoom, height: image.naturalHeight * zoom };
}

lens.begin();
