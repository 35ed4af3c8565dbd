// Owns the view of one channel on the page of its layer: its map for every image of the run,
// strongest first, with the input and the map of a compared run, the numbers of its row in the table,
// and kernels, suspects or exemplars of it. The address names the channel: layer-003.html#c17.
// report.js opens and closes it.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

/** Make an element of SVG. */
function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A part of a picture, which is loaded when it comes into sight; very wide parts are cut to `most`
    times their height. */
function cut(image, [x, y, w, h], height, alt, grey = false, most = 3) {
  const [width, tall] = ["width", "height"].map((side) => image.getAttribute(side));
  const whole = make("img", { loading: "lazy", decoding: "async", src: image.src, alt: "", width, height: tall });
  const across = Math.min(Math.max(Math.round(height * w / h), height / 2), most * height);
  return draw("svg", { role: "img", "aria-label": alt, class: grey ? "crop grey" : "crop", width: across, height,
    viewBox: `${x} ${y} ${w} ${h}`, preserveAspectRatio: "xMidYMid slice" },
  draw("foreignObject", { width, height: tall }, whole));
}

/** A channel's tile, cut out of its grid. */
function crop({ grid, image }, channel, height, alt) {
  return cut(image, grid.place(grid.slots.get(channel) * grid.slices), height, alt, grid.grey);
}

/** What the run of a frame is called, where there are two. */
function run(frame) {
  return frame.element.parentElement.querySelector(".name small").textContent;
}

class ChannelView {
  constructor(group) {
    this.group = group;
    this.box = group.element.querySelector("[data-channel]");
  }

  /** The frames of this run that have a tile of the channel. */
  frames(channel) {
    return this.group.frames.filter(({ grid, element }) =>
      !("other" in element.parentElement.dataset) && grid.slots.has(channel));
  }

  /** The same tensor of the same image in the run that this one is compared with. */
  before({ element }, channel) {
    return this.group.frames.find((other) => "other" in other.element.parentElement.dataset
      && other.element.dataset.name === element.dataset.name && other.grid.slots.has(channel));
  }

  close() {
    this.box.hidden = true;
    this.group.element.classList.remove("opened");
    this.box.replaceChildren();
  }

  open(channel, row) {
    const value = (frame) => frame.grid.stat(channel, "max");
    const key = (frame) => (Number.isFinite(value(frame)) ? value(frame) : -Infinity);
    const frames = this.frames(channel).sort((a, b) => key(b) - key(a));
    this.title = make("h2", { tabIndex: -1 }, `Channel ${channel} `,
      make("small", {}, "of ", make("code", {}, this.group.element.dataset.layer), ` ${this.group.element.dataset.type}`));
    const head = make("header", { className: "bar" }, this.title, this.neighbours(channel));
    const pictures = make("div", { className: "excited" },
      ...frames.map((frame) => this.picture(frame, channel)));
    const main = make("div", {}, ...this.extras(channel), pictures);
    if (!frames.length) main.append(make("p", { className: "note", textContent: "This channel was not drawn (--channels or --collapse)." }));
    this.box.replaceChildren(head, make("div", { className: "sheet" }, main, this.facts(row)));
    this.box.hidden = false;
    this.group.element.classList.add("opened");
    this.box.scrollIntoView();
    this.title.focus({ preventScroll: true });
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

  picture(frame, channel) {
    const { input, grid } = frame;
    const name = frame.element.dataset.name;
    const before = this.before(frame, channel);
    const seen = () => make("img", { src: input.src, alt: `What the model saw of ${name}`, loading: "lazy",
      width: input.getAttribute("width"), height: input.getAttribute("height") });
    const map = crop(frame, channel, 96, `Channel ${channel} of ${name}`);
    const sides = make("div", { className: "trio" }, seen(), map);
    if (before) map.before(crop(before, channel, 96, `Channel ${channel} of ${name}, ${run(before)}`));
    if (frame.fits) {
      const under = seen();
      under.alt = "";
      const over = crop(frame, channel, 96, `Channel ${channel} over ${name}`);
      over.classList.add("tinted");
      sides.append(make("span", { className: "overlay" }, under, over));
    }
    const home = frame.element.parentElement.querySelector(".name a");
    const link = make("a", { href: home ? home.getAttribute("href") : "", textContent: name });
    const most = ({ grid: of }) => `max ${digits(of.stat(channel, "max"))}`;
    const text = before ? ` ${run(before)} ${most(before)} → ${run(frame)} ${most(frame)}` : ` ${most(frame)}`;
    return make("figure", {}, sides, make("figcaption", {}, link, text));
  }

  /** The numbers over all images, as they stand in the row of the table. */
  facts(row) {
    const heads = [...row.closest("table").tHead.rows[0].cells].map((cell) => cell.dataset.title ?? cell.textContent);
    const cells = [...row.cells].slice(1).map((cell) => cell.textContent);
    const rows = cells.map((text, n) => [heads[n + 1], text || "none"]);
    return make("dl", { className: "facts" }, ...rows.map(([term, text]) =>
      make("div", {}, make("dt", {}, term), make("dd", {}, text))));
  }

  /** What stands beside the layer: kernels, suspects of an audit, exemplars. */
  extras(channel) {
    return [...this.group.element.querySelectorAll("[data-extra]")].flatMap((box) => {
      const own = JSON.parse(box.dataset.extra)[channel];
      if (!own) return [];
      const [title, words] = ["h3", "small"].map((tag) => box.querySelector(tag).textContent);
      const picture = Array.isArray(own)
        ? cut(box.querySelector("img"), own, Math.max(96, own[3]), `${title}: channel ${channel}`, false, Infinity)
        : make("img", own);
      return [make("section", { className: "sought" }, make("h3", { textContent: title }),
        make("p", { className: "note", textContent: words }), make("div", { className: "scroll", tabIndex: 0 }, picture),
        box.querySelector(".key")?.cloneNode(true) ?? "")];
    });
  }
}
