// A channel of a layer: its map for every image of the run, strongest first, beside the input and
// over it, with what is known of it. The address names it: layer-003.html#c17.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const FIRST = 24; // images that are shown at once
const LIKE = 8; // correlated channels that are shown
const BINS = 16;

/** Make an element of SVG. */
function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A channel's tile, cut out of its grid; the picture is loaded when it comes into sight. */
function crop(frame, channel, height, alt) {
  const { grid, image } = frame;
  const [x, y, w, h] = grid.place(grid.slots.get(channel) * grid.slices);
  const [width, tall] = grid.size;
  const whole = make("img", { loading: "lazy", decoding: "async", src: image.src, alt: "", width, height: tall });
  const across = Math.min(Math.max(Math.round(height * w / h), height / 2), 3 * height);
  return draw("svg", { role: "img", "aria-label": alt, class: grid.grey ? "crop grey" : "crop", width: across, height,
    viewBox: `${x} ${y} ${w} ${h}`, preserveAspectRatio: "xMidYMid slice" },
  draw("foreignObject", { width, height: tall }, whole));
}

/** Pearson's r of two lists, NaN where one of them does not vary. */
function correlation(a, b) {
  const mean = (list) => list.reduce((sum, value) => sum + value, 0) / list.length;
  const [ma, mb] = [mean(a), mean(b)];
  let [ab, aa, bb] = [0, 0, 0];
  a.forEach((value, n) => {
    ab += (value - ma) * (b[n] - mb);
    aa += (value - ma) ** 2;
    bb += (b[n] - mb) ** 2;
  });
  return ab / Math.sqrt(aa * bb);
}

class ChannelView {
  constructor(group) {
    this.group = group;
    this.box = group.element.querySelector("[data-channel]");
    this.shown = FIRST;
  }

  /** The frames of this run that have a tile of the channel. */
  frames(channel) {
    return this.group.frames.filter(({ grid, element }) =>
      !("other" in element.parentElement.dataset) && grid.slots.has(channel));
  }

  open(channel, row) {
    this.channel = channel;
    this.row = row;
    this.shown = FIRST;
    this.group.chosen = channel;
    this.fill();
    this.box.hidden = false;
    this.group.element.classList.add("opened");
    this.box.scrollIntoView();
    this.title.focus({ preventScroll: true });
  }

  close() {
    this.box.hidden = true;
    this.group.element.classList.remove("opened");
    this.box.replaceChildren();
    this.channel = null;
  }

  fill() {
    const { channel } = this;
    const by = state.get("act") || "max";
    const value = (frame) => frame.grid.stat(channel, by);
    const key = (frame) => (Number.isFinite(value(frame)) ? value(frame) : -Infinity);
    const frames = this.frames(channel).sort((a, b) => key(b) - key(a));
    this.title = make("h2", { tabIndex: -1 }, `Channel ${channel} `,
      make("small", {}, "of ", make("code", {}, this.group.element.dataset.layer), ` ${this.group.element.dataset.type}`));
    const head = make("header", { className: "bar" }, this.title, this.neighbours(channel));
    const aside = make("div", { className: "known" }, this.kernel(channel), this.facts(), this.histogram(frames.map(value), by),
      this.alike(frames, channel));
    const pictures = make("div", { className: "excited" },
      ...frames.slice(0, this.shown).map((frame) => this.picture(frame, channel, by)));
    const main = make("div", {}, this.exemplars(channel), this.suspects(channel), this.order(by), pictures);
    if (frames.length > this.shown) main.append(this.more(frames.length));
    if (!frames.length) main.append(make("p", { className: "note", textContent: "This channel was not drawn (--max-maps or --collapse)." }));
    this.box.replaceChildren(head, make("div", { className: "sheet" }, main, aside));
  }

  address(channel) {
    return this.group.element.dataset.spot.replace(/^[^#]*/, "").replace(/0$/, channel);
  }

  neighbours(channel) {
    const all = this.group.channels;
    const at = all.indexOf(channel);
    const link = (n, text, rel) => (n in all
      ? make("a", { href: this.address(all[n]), textContent: text, className: rel }) : "");
    const close = make("button", { type: "button", textContent: "Close" });
    close.addEventListener("click", () => shut());
    return make("nav", { ariaLabel: "Neighbouring channels", className: "around" },
      link(at - 1, `← Channel ${all[at - 1]}`, "before"), link(at + 1, `Channel ${all[at + 1]} →`, "after"), close);
  }

  order(by) {
    const select = make("select", {}, ...[["max", "largest value"], ["mean", "mean"]].map(([value, text]) =>
      make("option", { value, textContent: text, selected: value === by })));
    select.addEventListener("change", () => {
      state.set("act", select.value === "max" ? "" : select.value);
      this.fill();
      this.box.querySelector("select").focus();
    });
    return make("label", { className: "note" }, "Images by the channel’s ", select);
  }

  more(count) {
    const button = make("button", { type: "button", textContent: `Show all ${count} images` });
    button.addEventListener("click", () => { this.shown = Infinity; this.fill(); });
    return button;
  }

  picture(frame, channel, by) {
    const { input, grid } = frame;
    const name = frame.element.dataset.name;
    const seen = () => make("img", { src: input.src, alt: `What the model saw of ${name}`, loading: "lazy",
      width: input.getAttribute("width"), height: input.getAttribute("height") });
    const map = crop(frame, channel, 96, `Channel ${channel} of ${name}`);
    const sides = make("div", { className: "trio" }, seen(), map);
    if (frame.fits) {
      const under = seen();
      under.alt = "";
      const over = crop(frame, channel, 96, `Channel ${channel} over ${name}`);
      over.classList.add("tinted");
      sides.append(make("span", { className: "overlay" }, under, over));
    }
    const home = frame.element.parentElement.querySelector(".name a");
    const link = make("a", { href: home ? home.getAttribute("href") : "", textContent: name });
    const run = frame.element.parentElement.querySelector(".name small")?.textContent; // of two
    return make("figure", {}, sides, make("figcaption", {}, link, run ? ` ${run}` : "", ` ${by} ${digits(grid.stat(channel, by))}`));
  }

  /** The numbers over all images, as they stand in the row of the table. */
  facts() {
    const heads = [...this.row.closest("table").tHead.rows[0].cells].map((cell) => cell.dataset.title ?? cell.textContent);
    const cells = [...this.row.cells].slice(1).map((cell) => cell.textContent);
    const rows = cells.map((text, n) => [heads[n + 1], text || "none"]);
    return make("dl", { className: "facts" }, ...rows.map(([term, text]) =>
      make("div", {}, make("dt", {}, term), make("dd", {}, text))));
  }

  /** The kernel that makes the channel, where kernels are shown. */
  kernel(channel) {
    const figure = this.group.element.querySelector("[data-kernels]");
    if (!figure) return "";
    const grid = new Grid(JSON.parse(figure.dataset.kernels));
    if (!grid.slots.has(channel)) return "";
    const image = figure.querySelector("img");
    const what = figure.closest("details").querySelector("small").textContent;
    return make("section", {}, make("h3", { textContent: "Kernel" }),
      crop({ grid, image }, channel, 96, `Kernel of channel ${channel}`),
      make("p", { className: "note", textContent: what }), figure.querySelector(".key")?.cloneNode(true) ?? "");
  }

  /** The places that excite the channel most, where exemplars are shown. */
  exemplars(channel) {
    const box = this.group.element.querySelector("[data-exemplars]");
    const own = box ? JSON.parse(box.dataset.exemplars)[channel] : null;
    if (!own) return "";
    const figures = own.map(({ title, ...image }) => make("figure", {}, make("img", image), title ? make("figcaption", {}, title) : ""));
    return make("section", { className: "sought" }, make("h3", { textContent: "What excites it most" }),
      make("p", { className: "note", textContent: box.querySelector("small").textContent }),
      make("div", { className: "excited" }, ...figures));
  }

  /** Its row of the audit's pictures, where it is drawn there. */
  suspects(channel) {
    const rows = [...this.group.element.querySelectorAll("[data-suspects]")].flatMap((figure) => {
      const { channels, width, rows: [top, height] = [] } = JSON.parse(figure.dataset.suspects);
      const at = channels.indexOf(channel);
      if (at < 0 || !height) return [];
      const image = figure.querySelector("img");
      const alt = `Channel ${channel} in the audit, with the images that excite it most`;
      const whole = make("img", { src: image.src, alt: "", width, height: image.getAttribute("height") });
      const row = draw("svg", { role: "img", "aria-label": alt, class: "crop", width, height,
        viewBox: `0 ${top + at * height} ${width} ${height}` },
      draw("foreignObject", { width, height: image.getAttribute("height") }, whole));
      return [make("div", { className: "scroll", tabIndex: 0 }, row)];
    });
    if (!rows.length) return "";
    return make("section", { className: "sought" }, make("h3", { textContent: "Suspect of the audit" }), ...rows);
  }

  histogram(values, by) {
    const known = values.filter(Number.isFinite);
    if (known.length < 2) return "";
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const counts = new Array(BINS).fill(0);
    for (const value of known) counts[Math.min(BINS - 1, Math.floor((value - low) / (high - low || 1) * BINS))]++;
    const most = Math.max(...counts);
    const bars = counts.map((count, n) => draw("rect", { class: "part", x: n * 10 + 1, width: 8,
      y: 60 - 60 * count / most, height: 60 * count / most }));
    const name = `${by} of ${known.length} images, from ${digits(low)} to ${digits(high)}; at most ${most} in a bar`;
    const plot = draw("svg", { class: "histogram", viewBox: `0 0 ${10 * BINS} 60`, role: "img",
      "aria-label": name, preserveAspectRatio: "none" }, ...bars);
    const ends = make("p", { className: "key" }, make("span", {}, digits(low)), make("span", { className: "of" }, `${by} of ${known.length} images`), make("span", {}, digits(high)));
    return make("section", {}, make("h3", { textContent: "Histogram over images" }), plot, ends);
  }

  alike(frames, channel) {
    const finite = (c) => frames.map(({ grid }) => grid.stat(c, "mean"));
    if (frames.length < 3) return "";
    const own = finite(channel);
    const found = this.group.channels.filter((c) => c !== channel && frames.every(({ grid }) => grid.slots.has(c)))
      .map((c) => [c, correlation(own, finite(c))]).filter(([, r]) => Number.isFinite(r))
      .sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, LIKE);
    if (!found.length) return "";
    const tiles = found.map(([c, r]) => make("a", { href: this.address(c) },
      crop(frames[0], c, 48, `Channel ${c}`), make("span", {}, `${c}: ${digits(Number(r.toFixed(2)))}`)));
    return make("section", {}, make("h3", { textContent: "Most correlated over the images" }),
      make("p", { className: "note", textContent: `Pearson’s r of the means over ${frames.length} images` }),
      make("div", { className: "alike" }, ...tiles));
  }
}
