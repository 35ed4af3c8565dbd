// Owns a page as a whole: which page of a single file is shown, the controls, the search, sortable
// tables and keys. What is set stands in the address, so that going back or sending a link shows the
// same. Without the scripts all pictures and numbers of a page are still there.
//
//   state           the values of the controls, from and to the address
//   filter          the search
//   sortable        tables
//   begin, route    bring a page to life; show what the address names
"use strict";

const frames = new Map(); // by element
const groups = new Map(); // by element
const channelRows = new Map(); // rows of the tables of channels, by the address of the channel
let current = null; // the page that is shown
let opened = null; // the view of the channel that is open
const voice = make("div", { className: "unseen", ariaLive: "polite" });
const announce = (text) => { voice.textContent = text; };
const shownPage = () => document.querySelector(".page:not([hidden])");
const compare = (a, b) => (a < b ? -1 : Number(a > b));

const sight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const frame = frames.get(target);
    frame.visible = isIntersecting;
    frame.paint();
  }
}, { rootMargin: "200px" });
// paper shows what is out of sight, too
addEventListener("beforeprint", () => {
  for (const frame of frames.values()) if (!frame.visible) Object.assign(frame, { visible: true }).paint();
});
const size = new ResizeObserver((entries) => {
  for (const { target } of entries) frames.get(target).fit();
});

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
    const query = String(this.values);
    const search = query ? `?${query}` : "";
    history.replaceState(null, "", location.pathname + search + hash);
  },
};

/** What the controls do to a group, by their names. */
const GROUP_CONTROLS = {
  sort: (group, value) => group.sort(value || "drawn"),
  size: (group, value) => group.resize(Number(value) || 0),
  over: (group, value) => group.lay(Number(value) || 0),
  zeros: (group, value) => group.outlineZeros(Boolean(value)),
  cmap: () => {}, // of the whole document
};

/** What the controls do to the list of layers of a comparison, by their names. */
const LIST_CONTROLS = {
  rank: (list, value) => {
    const layers = [...list.children];
    layers.forEach((layer, position) => { layer.dataset.position ??= position; });
    const byPosition = (a, b) => a.dataset.position - b.dataset.position;
    const byChange = (a, b) => b.dataset.change - a.dataset.change || byPosition(a, b);
    list.append(...layers.sort(value ? byChange : byPosition));
  },
  changed: (list, value) => list.classList.toggle("changed", Boolean(value)),
};

/** Show controls as they are set in the address. */
function mirror(page) {
  for (const control of page.querySelectorAll("[data-state]")) {
    const { state: name } = control.dataset;
    const value = state.get(name);
    if (control.type === "checkbox") {
      control.checked = Boolean(value);
    } else if (control.type === "range") {
      const number = Number(value) || 0;
      const unset = name === "over" ? "off" : "automatic";
      control.value = number;
      control.nextElementSibling.value = number ? `${number} ${name === "over" ? "%" : "px"}` : unset;
    } else {
      control.value = value;
      if (control.selectedIndex === -1) control.selectedIndex = 0; // no such choice
    }
  }
}

/** Do to a page what a control is set to. */
function apply(page, name) {
  const value = state.get(name);
  // what another page has set is of no concern where there is no control for it
  const hasControl = page.querySelector(`[data-state="${name}"]`) !== null;
  if (hasControl && name in GROUP_CONTROLS) {
    for (const element of page.querySelectorAll("[data-group]")) GROUP_CONTROLS[name](groups.get(element), value);
  }
  if (name in LIST_CONTROLS) {
    for (const list of page.querySelectorAll("[data-ranked]")) LIST_CONTROLS[name](list, value);
  }
  // over the input grey maps would not be seen
  document.documentElement.dataset.cmap = state.get("cmap") || (state.get("over") ? "viridis" : "");
  mirror(page);
}

/** Set what a control says. */
function change(control, page) {
  const { state: name } = control.dataset;
  let { value } = control;
  if (control.type === "checkbox") value = control.checked ? "1" : "";
  state.set(name, value === "0" ? "" : value);
  apply(page, name);
}

// ---------------------------------------------------------------------------------------------
// Search.

const MOST_RESULTS = 12;
const search = document.querySelector("[data-filter]");
const results = document.querySelector(".results");

const termsOf = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
const matches = (text, terms) => terms.every((term) => text.toLowerCase().includes(term));

/** `conv1 17`, `conv1 c17` and `channel 17` ask for channel 17 of the layers that match the rest;
    null for any other text. */
function channelQuery(text) {
  const query = /^(?:(.*)\s)?(?:channel\s*|c|#)?(\d+)$/i.exec(text.trim());
  if (!query) return null;
  const [, rest = "", channel] = query;
  return { channel: Number(channel), terms: termsOf(rest).filter((term) => term !== "channel") };
}

/** The tensors of a page that have the channel that is asked for. */
function tensorsWith(page, query) {
  if (!query) return [];
  return [...page.querySelectorAll("[data-spot]")].filter(({ dataset }) =>
    query.channel < Number(dataset.maps) && matches(`${dataset.layer} ${dataset.type}`, query.terms));
}

/** Show what of the page matches the search, and links to the channels that it asks for. If nothing
    matches, all is shown. */
function filter(page) {
  const terms = termsOf(search.value);
  const query = channelQuery(search.value);
  const tensors = tensorsWith(page, query);
  const items = [...page.querySelectorAll("[data-item]")];
  const matching = items.filter((item) => matches(item.dataset.item, terms) || tensors.includes(item));
  for (const item of items) item.hidden = matching.length > 0 && !matching.includes(item);
  for (const stage of page.querySelectorAll("[data-stage]")) {
    const hasItems = stage.querySelector("[data-item]:not([hidden])") !== null;
    stage.hidden = !hasItems;
    if (terms.length && matching.length && hasItems) stage.open = true;
  }
  hideEmptied(page);
  for (const map of page.querySelectorAll(".flow .strip > a")) {
    const isAsked = query !== null && tensors.includes(map.closest("[data-spot]")) && map.href.endsWith(`c${query.channel}`);
    map.ariaCurrent = isAsked ? "true" : null;
  }
  let count = "";
  if (terms.length && matching.length) count = `${matching.length} of ${items.length} entries shown`;
  else if (terms.length) count = `no results for “${search.value.trim()}”`;
  search.closest("header").querySelector(".count").textContent = count;
  showResults(tensors, query);
}

/** Hide sections, and headings of lists, whose items are all hidden. */
function hideEmptied(page) {
  for (const part of page.querySelectorAll("section:not([data-item]), :is(h2, h3) + :is(ul, .scroll)")) {
    const items = [...part.querySelectorAll("[data-item]")];
    const head = part.matches("section") ? part : part.previousElementSibling;
    if (items.length) head.hidden = items.every((item) => item.hidden);
  }
}

/** Link the channel of each layer, once. */
function showResults(tensors, query) {
  const layers = new Map(); // first tensors of the layers, by the page of the layer
  for (const { dataset } of tensors) {
    const page = dataset.spot.replace(/(t\d+-)?c0$/, "");
    if (!layers.has(page)) layers.set(page, dataset);
  }
  const links = [...layers.values()].slice(0, MOST_RESULTS).map(({ layer, type, spot }) => make("a", {
    href: channelAddress(spot, query.channel),
    textContent: `${layer} ${type}, channel ${query.channel}`,
  }));
  results.replaceChildren(...links.map((link) => make("li", {}, link)));
  results.hidden = !links.length;
}

/** Open what the search has found, if it is one thing: a channel, or a layer or image. */
function openOnlyMatch() {
  const channels = results.querySelectorAll("a");
  const items = shownPage().querySelectorAll("[data-item]:not([hidden])");
  if (channels.length === 1) channels[0].click();
  else if (!channels.length && search.value.trim() && items.length === 1) items[0].querySelector("a[href]")?.click();
}

// ---------------------------------------------------------------------------------------------
// Tables.

/** The number in a cell, -Infinity for a dash; null for another text. */
function numberIn(cell) {
  const text = cell.textContent.trim();
  if (text === "–") return -Infinity;
  const number = Number(text.replace(/[<>%,\s]/g, "").replace("−", "-"));
  return Number.isNaN(number) ? null : number;
}

/** Numbers by their size, in front of texts. */
function compareCells(a, b) {
  const first = numberIn(a);
  const second = numberIn(b);
  if (first !== null && second !== null) return first - second || 0;
  if (first === null && second === null) return compare(a.textContent.trim(), b.textContent.trim());
  return first === null ? 1 : -1;
}

/** Sort the rows of a table by a column. */
function sortRows(table, rows, column, isDescending) {
  const sign = isDescending ? -1 : 1;
  const sorted = [...rows].sort((a, b) => sign * compareCells(a.cells[column], b.cells[column]));
  table.tBodies[0].append(...sorted);
  for (const head of table.tHead.rows[0].cells) head.setAttribute("aria-sort", "none");
  table.tHead.rows[0].cells[column].setAttribute("aria-sort", isDescending ? "descending" : "ascending");
}

/** Headings become buttons that sort their table; the address keeps the column: `3d` is the fourth,
    descending. */
function sortable(table) {
  const { sortable: name } = table.dataset;
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...table.tBodies[0].rows]; // those that are equal stay in this order
  heads.forEach((head, column) => {
    head.dataset.title = head.textContent;
    const button = make("button", { type: "button", textContent: head.textContent });
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const sorted = head.getAttribute("aria-sort") ?? "none";
      // numbers begin with the largest, names with A
      const isDescending = sorted === "none" ? head.classList.contains("n") : sorted === "ascending";
      sortRows(table, rows, column, isDescending);
      state.set(name, `${column}${isDescending ? "d" : "a"}`);
    });
  });
  const [, column, direction] = /^(\d+)([ad])$/.exec(state.get(name)) ?? [];
  if (column in heads) sortRows(table, rows, column, direction === "d");
}

// ---------------------------------------------------------------------------------------------
// Pages: which of several is shown, which channel is open.

/** Bring a page to life, once: its groups are known from now on. */
function begin(page) {
  if (page.dataset.begun) return;
  page.dataset.begun = "yes";
  for (const control of page.querySelectorAll(".control")) control.hidden = false;
  for (const image of page.querySelectorAll("[data-same]")) {
    image.src = document.getElementById(image.dataset.same).src;
  }
  for (const element of page.querySelectorAll("[data-group]")) groups.set(element, new Group(element));
  for (const table of page.querySelectorAll("[data-sortable]")) sortable(table);
  for (const button of page.querySelectorAll("[data-unfold]")) {
    button.addEventListener("click", () => unfold(button, page));
  }
  for (const control of page.querySelectorAll("[data-state]")) {
    control.addEventListener(control.type === "range" ? "input" : "change", () => change(control, page));
  }
}

/** Show all channels of a layer. */
function unfold(button, page) {
  const element = button.closest("[data-group]");
  groups.get(element).most = Infinity;
  element.classList.remove("folded");
  button.remove();
  apply(page, "sort");
  apply(page, "size");
}

/** Show what the address names: in a report of one file its page, else the only one; and its channel. */
function route() {
  const pages = [...document.querySelectorAll(".page")];
  const name = decodeURIComponent(location.hash.slice(1));
  const row = channelRows.get(name);
  const target = row ?? (name ? document.getElementById(name) : null);
  const page = target?.closest(".page") ?? pages.find((other) => !other.hidden) ?? pages[0];
  for (const other of pages) other.hidden = other !== page;
  if (page !== current) turnTo(page);
  if (pages.length > 1) {
    document.title = [page.dataset.title, document.body.dataset.model, "featviz"].filter(Boolean).join(" · ");
  }
  opened?.close();
  opened = null;
  if (row) {
    openChannel(row, name);
  } else if (target) {
    openDetails(target);
    if (pages.length > 1) target.scrollIntoView();
  } else if (pages.length > 1) {
    scrollTo(0, 0);
  }
}

/** A print shows what nobody has scrolled to: once what is in sight is there, the rest may load, too. */
function loadAll(page) {
  for (const image of page.querySelectorAll("img:not(.gallery img)")) image.loading = "eager";
}

/** Make a page the shown one. */
function turnTo(page) {
  if (document.readyState === "complete") loadAll(page);
  begin(page);
  for (const name of [...Object.keys(GROUP_CONTROLS), ...Object.keys(LIST_CONTROLS)]) apply(page, name);
  if (current) { // another page of one file
    search.value = "";
    state.set("q", "");
  }
  filter(page);
  current = page;
}

/** Unfold all that an element is in. */
function openDetails(element) {
  const details = element.closest("details");
  if (!details) return;
  details.open = true;
  openDetails(details.parentElement);
}

function openChannel(row, name) {
  opened = new ChannelView(groups.get(row.closest("[data-group]")));
  opened.box.id = name;
  opened.open(Number(row.cells[0].textContent), row);
}

/** Close the channel: the address names its page again. */
function shut() {
  const { group } = opened;
  state.write("single" in document.body.dataset ? `#${shownPage().id}` : "");
  route();
  group.frames[0]?.element.focus();
}

// ---------------------------------------------------------------------------------------------
// Keys and links.

/** Focus the next (1) or the previous (-1) grid that is shown. */
function walk(step) {
  const shown = [...frames.keys()].filter((element) => element.offsetParent);
  const position = shown.indexOf(document.activeElement);
  const start = step > 0 ? 0 : shown.length - 1;
  const next = shown[position < 0 ? start : position + step];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

const PAGE_KEYS = {
  j: () => walk(1),
  k: () => walk(-1),
  p: () => document.querySelector("[data-places]")?.click(),
  "?": () => help.open(),
  "/": () => search.focus(),
  "[": () => shownPage().querySelector("[rel=prev]")?.click(),
  "]": () => shownPage().querySelector("[rel=next]")?.click(),
};
const CHANNEL_KEYS = { // while a channel is open
  Escape: () => shut(),
  ArrowLeft: () => opened.box.querySelector(".before")?.click(),
  ArrowRight: () => opened.box.querySelector(".after")?.click(),
};

function key(event) {
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  const isShortcut = event.ctrlKey || event.metaKey || event.altKey;
  if (isTyping || isShortcut || document.querySelector("dialog[open]")) return;
  let action = PAGE_KEYS[event.key];
  // in a grid arrows move the cursor
  if (opened && !event.target.closest(".frame")) action ??= CHANNEL_KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

/** Let a link that is clicked take along what is set to the other pages of the report. */
function carry(event) {
  const link = event.target.closest("a[href]");
  if (!link || link.getAttribute("href").startsWith("#")) return;
  const url = new URL(link.href);
  for (const name of CARRIED) {
    if (state.get(name)) url.searchParams.set(name, state.get(name));
    else url.searchParams.delete(name);
  }
  link.href = url.href;
}

function listen() {
  document.querySelector("[data-help]").addEventListener("click", () => help.open());
  search.addEventListener("input", () => {
    state.set("q", search.value.trim());
    filter(shownPage());
  });
  search.addEventListener("keydown", (event) => event.key === "Enter" && openOnlyMatch());
  document.addEventListener("keydown", key);
  document.addEventListener("click", carry, true);
  addEventListener("load", () => opened?.title.focus({ preventScroll: true })); // the browser took it
  addEventListener("load", () => loadAll(shownPage()));
  addEventListener("hashchange", route);
  addEventListener("popstate", () => { state.values = new URLSearchParams(location.search); });
  addEventListener("pageshow", () => mirror(shownPage()));
  let waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => frames.forEach((frame) => frame.fit()));
  });
}

viewer.build();
help.build();
document.body.append(viewer.box, help.box, tip.box, voice);
for (const control of document.querySelectorAll(".top .control")) control.hidden = false;
for (const row of document.querySelectorAll(".channels tr[id]")) {
  channelRows.set(row.id, row); // the address now leads to the view of the channel, not to its row
  row.removeAttribute("id");
}
search.value = state.get("q");
listen();
route();
