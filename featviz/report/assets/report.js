// Owns a page as a whole: which page of a single file is shown, the controls, the search, sortable
// tables and keys. What is set stands in the address, so that going back or sending a link shows the
// same. It is loaded last; without the scripts all pictures and numbers of a page are still there.
//
//   state           the values of the controls, from and to the address
//   filter          the search
//   begin, route    bring a page to life; show what the address names
"use strict";

const frames = new Map(); // by element
const groups = new Map(); // by element
let current = null; // the page that is shown
const channelRows = new Map(); // rows of the tables of channels, by the address of the channel
let opened = null; // the channel view that is open
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
const size = new ResizeObserver((entries) => entries.forEach(({ target }) => frames.get(target).fit()));

// ---------------------------------------------------------------------------------------------
// What is set stands in the address: going back, loading again or sending a link shows the same.

const CARRIED = ["sort", "size", "cmap", "over", "zeros"]; // from page to page
const state = {
  values: new URLSearchParams(location.search),
  get(name) { return this.values.get(name) ?? ""; },
  set(name, value) {
    if (value) this.values.set(name, value);
    else this.values.delete(name);
    this.write(location.hash);
  },
  write(hash) {
    const search = String(this.values);
    history.replaceState(null, "", location.pathname + (search && `?${search}`) + hash);
  },
};

const APPLIED = { // by the names of the controls
  sort: (group, value) => group.sort(value || "drawn"),
  size: (group, value) => group.resize(Number(value) || 0),
  over: (group, value) => group.lay(Number(value) || 0),
  zeros: (group, value) => group.outlineZeros(Boolean(value)),
  cmap: () => {},
};

const ARRANGED = { // of a page, by the names of the controls
  rank: (list, value) => {
    const rows = [...list.children];
    rows.forEach((row, n) => { row.dataset.position ??= n; });
    const key = (row) => (value ? -Number(row.dataset.change) : Number(row.dataset.position));
    list.append(...rows.sort((a, b) => key(a) - key(b) || a.dataset.position - b.dataset.position));
  },
  changed: (list, value) => list.classList.toggle("changed", Boolean(value)),
};

function color() {
  document.documentElement.dataset.cmap = state.get("cmap") || (state.get("over") ? "viridis" : "");
}

/** Give controls the values of the address. */
function mirror(page) {
  for (const control of page.querySelectorAll("[data-state]")) {
    const value = state.get(control.dataset.state);
    if (control.type === "checkbox") control.checked = Boolean(value);
    else control.value = control.type === "range" ? Number(value) || 0 : value;
    const [unit, none] = control.dataset.state === "over" ? ["%", "off"] : ["px", "as drawn"];
    if (control.type === "range") control.nextElementSibling.value = Number(value) ? `${value} ${unit}` : none;
    if (control.selectedIndex === -1) control.selectedIndex = 0;
  }
}

function apply(page, name) {
  // what another page has set is of no concern where there is no control for it
  const concerned = page.querySelector(`[data-state="${name}"]`) ? page.querySelectorAll("[data-group]") : [];
  for (const element of concerned) APPLIED[name]?.(groups.get(element), state.get(name));
  for (const list of page.querySelectorAll("[data-ranked]")) ARRANGED[name]?.(list, state.get(name));
  color();
  mirror(page);
}

function set(control, page) {
  const { state: name } = control.dataset;
  const value = control.type === "checkbox" ? (control.checked ? "1" : "") : control.value;
  state.set(name, value === "0" ? "" : value);
  apply(page, name);
}

// ---------------------------------------------------------------------------------------------
// Search and tables.

const wordsOf = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
const matches = (text, words) => words.every((word) => text.toLowerCase().includes(word));

/** `conv1 17`, `conv1 c17` and `channel 17` ask for channel 17 of the layers that match the rest. */
function channelAsked(text) {
  const parts = /^(?:(.*)\s)?(?:channel\s*|c|#)?(\d+)$/i.exec(text.trim());
  return parts && { rest: wordsOf(parts[1] ?? "").filter((word) => word !== "channel"), channel: Number(parts[2]) };
}

const search = document.querySelector("[data-filter]");

/** Show the parts of the page that match the search, and links to the channels that it asks for. */
function filter(page) {
  const words = wordsOf(search.value);
  const channel = channelAsked(search.value);
  const spots = [...page.querySelectorAll("[data-spot]")].filter(({ dataset }) => channel
    && channel.channel < Number(dataset.maps) && matches(`${dataset.layer} ${dataset.type}`, channel.rest));
  const items = [...page.querySelectorAll("[data-item]")];
  const found = items.filter((item) => matches(item.dataset.item, words) || spots.includes(item));
  for (const item of items) item.hidden = found.length > 0 && !found.includes(item);
  for (const stage of page.querySelectorAll("[data-stage]")) {
    const match = stage.querySelector("[data-item]:not([hidden])");
    stage.hidden = !match;
    if (words.length && found.length && match) stage.open = true;
  }
  search.closest("header").querySelector(".count").textContent = !words.length ? ""
    : found.length ? `${found.length} of ${items.length}` : `nothing matches “${search.value.trim()}”`;
  const list = document.querySelector(".results");
  const home = ({ dataset }) => dataset.spot.replace(/(t\d+-)?c0$/, "");
  const layers = [...new Map(spots.reverse().map((spot) => [home(spot), spot])).values()].reverse();
  list.replaceChildren(...layers.slice(0, 12).map(({ dataset }) => make("li", {}, make("a", {
    href: dataset.spot.replace(/0$/, channel.channel),
    textContent: `${dataset.layer} ${dataset.type}, channel ${channel.channel}`,
  }))));
  list.hidden = !layers.length;
}

/** Open what the search has found, if it is one thing: a channel, or a layer or image. */
function openOnlyHit() {
  const channels = document.querySelectorAll(".results a");
  const items = shownPage().querySelectorAll("[data-item]:not([hidden])");
  if (channels.length === 1) channels[0].click();
  else if (!channels.length && search.value.trim() && items.length === 1) items[0].querySelector("a[href]")?.click();
}

/** The number in a cell, to sort by; what is no number sorts as text. */
function worth(cell) {
  const number = Number(cell.textContent.replace(/[<>%,\s]/g, "").replace("−", "-"));
  return cell.textContent.trim() === "–" ? -Infinity : Number.isNaN(number) ? cell.textContent.trim() : number;
}

/** Headings become buttons that sort their table; the address keeps the column. */
function sortable(table) {
  const { sortable: key } = table.dataset;
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...table.tBodies[0].rows];
  const sort = (column, down) => {
    const compare = (a, b) => (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1);
    const keyed = rows.map((row) => [worth(row.cells[column]), row]);
    keyed.sort(([a], [b]) => (down ? compare(b, a) : compare(a, b)));
    table.tBodies[0].append(...keyed.map(([, row]) => row));
    heads.forEach((head, n) => head.setAttribute("aria-sort", n === column ? (down ? "descending" : "ascending") : "none"));
  };
  heads.forEach((head, column) => {
    head.dataset.title = head.textContent;
    const button = make("button", { type: "button", textContent: head.textContent });
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const down = now ? now !== "descending" : head.classList.contains("n");
      sort(column, now === "none" || !now ? head.classList.contains("n") : down);
      state.set(key, `${column}${head.getAttribute("aria-sort") === "descending" ? "d" : "a"}`);
    });
  });
  const kept = /^(\d+)([ad])$/.exec(state.get(key));
  if (kept && heads[kept[1]]) sort(Number(kept[1]), kept[2] === "d");
}

// ---------------------------------------------------------------------------------------------
// Pages: which of several is shown, which channel is open, keys.

/** Bring a page to life, once: its groups are known from now on. */
function begin(page) {
  if (page.dataset.begun) return;
  page.dataset.begun = "yes";
  page.querySelectorAll(".control").forEach((control) => { control.hidden = false; });
  page.querySelectorAll("[data-same]").forEach((image) => {
    image.src = document.getElementById(image.dataset.same).src;
  });
  for (const element of page.querySelectorAll("[data-group]")) {
    groups.set(element, new Group(element));
  }
  page.querySelectorAll("[data-sortable]").forEach(sortable);
  for (const button of page.querySelectorAll("[data-unfold]")) {
    button.addEventListener("click", () => {
      groups.get(button.closest("[data-group]")).most = Infinity;
      button.remove();
      ["sort", "size"].forEach((name) => apply(page, name));
    });
  }
  for (const control of page.querySelectorAll("[data-state]")) {
    control.addEventListener(control.type === "range" ? "input" : "change", () => set(control, page));
  }
}

const shownPage = () => document.querySelector(".page:not([hidden])");

/** In a report of one file, show the page that the address names; else the only one. Open the
    channel that it names. */
function route() {
  const pages = [...document.querySelectorAll(".page")];
  const name = decodeURIComponent(location.hash.slice(1));
  const row = channelRows.get(name);
  const target = row ?? (name && document.getElementById(name));
  const page = target?.closest?.(".page") || pages.find((p) => !p.hidden) || pages[0];
  pages.forEach((other) => { other.hidden = other !== page; });
  begin(page);
  if (page !== current) {
    [...Object.keys(APPLIED), ...Object.keys(ARRANGED)].forEach((name) => apply(page, name));
    if (current) state.set("q", search.value = ""); // another page of one file
    filter(page);
  }
  current = page;
  if (pages.length > 1) document.title = [page.dataset.title, document.body.dataset.model, "featviz"].filter(Boolean).join(" · ");
  opened?.close();
  opened = null;
  if (row) openChannel(row, name);
  else if (target) {
    for (let e = target; e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true;
    if (pages.length > 1) target.scrollIntoView();
  } else if (pages.length > 1) scrollTo(0, 0);
}

function openChannel(row, name) {
  const group = groups.get(row.closest("[data-group]"));
  opened = new ChannelView(group);
  opened.box.id = name;
  opened.open(Number(row.cells[0].textContent), row);
}

/** Close the channel: the address names its page again. */
function shut() {
  const home = "single" in document.body.dataset ? `#${shownPage().id}` : "";
  const group = opened.group;
  state.write(home);
  route();
  group.frames[0]?.element.focus();
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
  const page = shownPage();
  const actions = {
    j: () => walk(1), k: () => walk(-1), p: () => document.querySelector("[data-places]")?.click(), "?": () => help.open(),
    "/": () => search.focus(),
    "[": () => page.querySelector("[rel=prev]")?.click(),
    "]": () => page.querySelector("[rel=next]")?.click(),
    ...(opened && !event.target.closest(".frame") && {
      Escape: shut,
      ArrowLeft: () => opened.box.querySelector(".before")?.click(),
      ArrowRight: () => opened.box.querySelector(".after")?.click(),
    }),
  };
  if (!(event.key in actions)) return;
  event.preventDefault();
  actions[event.key]();
}

/** What is set goes along to the other pages of the report. */
function carry(event) {
  const link = event.target.closest?.("a[href]");
  if (!link || link.getAttribute("href").startsWith("#")) return;
  const url = new URL(link.href);
  for (const name of CARRIED) {
    if (state.get(name)) url.searchParams.set(name, state.get(name));
    else url.searchParams.delete(name);
  }
  link.href = url.href;
}

for (const one of [viewer, help]) {
  one.build();
  document.body.append(one.box);
}
document.body.append(tip.box, voice);
document.querySelectorAll(".top .control").forEach((control) => { control.hidden = false; });
document.querySelector("[data-help]").addEventListener("click", () => help.open());
search.value = state.get("q");
search.addEventListener("input", () => {
  state.set("q", search.value.trim());
  filter(shownPage());
});
search.addEventListener("keydown", (event) => event.key === "Enter" && openOnlyHit());
document.addEventListener("keydown", keys);
document.addEventListener("click", carry, true);
for (const row of document.querySelectorAll(".channels tr[id]")) {
  channelRows.set(row.id, row); // the address now leads to the view of the channel, not to its row
  row.removeAttribute("id");
}
addEventListener("load", () => opened?.title.focus({ preventScroll: true })); // the browser took it
addEventListener("hashchange", route);
addEventListener("popstate", () => { state.values = new URLSearchParams(location.search); });
addEventListener("pageshow", () => mirror(shownPage()));
let waiting = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => frames.forEach((frame) => frame.fit()));
});
route();
