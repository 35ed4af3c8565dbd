// Owns the view of one channel on the page of its layer: its map for every image of the run,
// strongest first, with the input and the map of a compared run, the numbers of its row in the table,
// and kernels, suspects or exemplars of it. The address names the channel: layer-003.html#c17.
// report.js opens and closes it.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const CROP = 96; // pixels of the height of a map

/** Make an element of SVG. */
function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A rectangle of a picture, which is loaded when it comes into sight.
    @param box [left, top, width, height] in pixels of the picture
    @param height in pixels on the page
    @param widest of the rectangle, in heights: of a wider one the middle is shown */
function cut(image, [x, y, w, h], height, alt, { isGrey = false, widest = 3 } = {}) {
  const size = { width: image.getAttribute("width"), height: image.getAttribute("height") };
  const picture = make("img", { loading: "lazy", decoding: "async", src: image.src, alt: "", ...size });
  const width = clamp(Math.round((height * w) / h), height / 2, widest * height);
  const attributes = { role: "img", "aria-label": alt, class: isGrey ? "crop grey" : "crop", width, height,
    viewBox: `${x} ${y} ${w} ${h}`, preserveAspectRatio: "xMidYMid slice" };
  return draw("svg", attributes, draw("foreignObject", size, picture));
}

/** A channel's tile, cut out of its grid. */
function crop({ grid, image }, channel, height, alt) {
  const box = grid.box(grid.slots.get(channel) * grid.slices);
  return cut(image, box, height, alt, { isGrey: grid.grey });
}

/** The address of a channel's view, from that of the layer's channel 0. */
const channelAddress = (spot, channel) => spot.replace(/0$/, channel);

/** What the run of a frame is called, where there are two. */
function runName(frame) {
  return frame.element.parentElement.querySelector(".name small").textContent;
}

class ChannelView {
  constructor(group) {
    this.group = group;
    this.box = group.element.querySelector("[data-channel]");
  }

  /** Show a channel.
      @param row of the table of channels, with its numbers over all images */
  open(channel, row) {
    const { layer, type } = this.group.element.dataset;
    this.title = make("h2", { tabIndex: -1 }, `Channel ${channel} `,
      make("small", {}, "of ", make("code", {}, layer), ` ${type}`));
    const head = make("header", { className: "bar" }, this.title, this.neighbours(channel));
    const frames = this.frames(channel);
    const pictures = frames.map((frame) => this.picture(frame, channel));
    const main = make("div", {}, ...this.extras(channel), make("div", { className: "excited" }, ...pictures));
    if (!frames.length) {
      const text = "This channel was not drawn (--channels or --collapse).";
      main.append(make("p", { className: "note", textContent: text }));
    }
    this.box.replaceChildren(head, make("div", { className: "sheet" }, main, this.facts(row)));
    this.box.hidden = false;
    this.group.element.classList.add("opened");
    this.box.scrollIntoView();
    this.title.focus({ preventScroll: true });
  }

  close() {
    this.box.hidden = true;
    this.group.element.classList.remove("opened");
    this.box.replaceChildren();
  }

  /** The frames of this run that have a tile of the channel, of the largest maximum first. */
  frames(channel) {
    const frames = this.group.frames.filter((frame) => !frame.isOther && frame.grid.slots.has(channel));
    const rank = ({ grid }) => {
      const maximum = grid.stat(channel, "max");
      return Number.isFinite(maximum) ? maximum : -Infinity;
    };
    return frames.sort((a, b) => rank(b) - rank(a));
  }

  /** The same tensor of the same image in the run that this one is compared with. */
  before(frame, channel) {
    return this.group.frames.find((other) => other.isOther && other.imageName === frame.imageName
      && other.grid.slots.has(channel));
  }

  neighbours(channel) {
    const { channels } = this.group;
    const position = channels.indexOf(channel);
    const link = (neighbour, text, className) => {
      if (neighbour === undefined) return "";
      const href = channelAddress(this.group.element.dataset.spot, neighbour).replace(/^[^#]*/, "");
      return make("a", { href, textContent: text(neighbour), className });
    };
    const closing = make("button", { type: "button", textContent: "Close" });
    closing.addEventListener("click", () => shut());
    return make("nav", { ariaLabel: "Neighbouring channels", className: "around" },
      link(channels[position - 1], (other) => `← Channel ${other}`, "before"),
      link(channels[position + 1], (other) => `Channel ${other} →`, "after"), closing);
  }

  /** The map of an image beside its input, between them that of a compared run, and behind them the
      map over the input. */
  picture(frame, channel) {
    const { imageName } = frame;
    const before = this.before(frame, channel);
    const pictures = [this.seen(frame, `What the model saw of ${imageName}`)];
    if (before) pictures.push(crop(before, channel, CROP, `Channel ${channel} of ${imageName}, ${runName(before)}`));
    pictures.push(crop(frame, channel, CROP, `Channel ${channel} of ${imageName}`));
    if (frame.fits) {
      const over = crop(frame, channel, CROP, `Channel ${channel} over ${imageName}`);
      over.classList.add("tinted");
      pictures.push(make("span", { className: "overlay" }, this.seen(frame, ""), over));
    }
    const home = frame.element.parentElement.querySelector(".name a");
    const link = make("a", { href: home?.getAttribute("href") ?? "", textContent: imageName });
    const maximum = ({ grid }) => `max ${digits(grid.stat(channel, "max"))}`;
    let text = maximum(frame);
    if (before) text = `${runName(before)} ${maximum(before)} → ${runName(frame)} ${text}`;
    return make("figure", {}, make("div", { className: "trio" }, ...pictures), make("figcaption", {}, link, ` ${text}`));
  }

  /** What the model saw of a frame's image. */
  seen({ input }, alt) {
    const width = input.getAttribute("width");
    const height = input.getAttribute("height");
    return make("img", { src: input.src, alt, loading: "lazy", width, height });
  }

  /** The numbers over all images, as they stand in the row of the table. */
  facts(row) {
    const heads = [...row.closest("table").tHead.rows[0].cells];
    const titles = heads.map((head) => head.dataset.title ?? head.textContent);
    const facts = [...row.cells].map((cell, column) => make("div", {}, make("dt", {}, titles[column]),
      make("dd", {}, cell.textContent || "none")));
    return make("dl", { className: "facts" }, ...facts.slice(1)); // the first is the channel
  }

  /** What stands beside the layer: kernels, suspects of an audit, exemplars. */
  extras(channel) {
    const sections = [];
    for (const box of this.group.element.querySelectorAll("[data-extra]")) {
      const row = box.querySelector(`[data-row="${channel}"]`);
      const extra = row ?? JSON.parse(box.dataset.extra)[channel];
      if (extra) sections.push(this.extra(box, extra, channel));
    }
    return sections;
  }

  /** @param extra a row of suspects, a box in the picture of all channels, or a picture of its own
             with its tiles */
  extra(box, extra, channel) {
    const title = box.querySelector("h3").textContent;
    const text = box.querySelector("small").textContent;
    let picture;
    let key = box.querySelector(".key")?.cloneNode(true) ?? "";
    if (extra instanceof Element) {
      picture = make("ul", { className: "suspects" }, extra.cloneNode(true));
      key = ""; // each row has its own
    } else if (Array.isArray(extra)) {
      const height = Math.max(CROP, extra[3]);
      picture = cut(box.querySelector("img"), extra, height, `${title}: channel ${channel}`, { widest: Infinity });
    } else {
      const { tiles, ...properties } = extra;
      const image = make("img", properties);
      const figures = tiles.map(([box, tileText]) => make("figure", {}, cut(image, box, box[3], tileText),
        make("figcaption", { textContent: tileText })));
      picture = make("div", { className: "tiled" }, ...figures);
    }
    return make("section", { className: "sought" }, make("h3", { textContent: title }),
      make("p", { className: "note", textContent: text }),
      make("div", { className: "scroll", tabIndex: 0 }, picture), key);
  }
}
