// map.js: the tree on the token axis. A block is a bar from its first to its last token, filled by where its KV lies;
// its children begin where it ends. When rows are thinner than THIN pixels, each pixel shows the mean of what it covers.

const THIN = 2,
  TALLEST = 30,
  WIDEST = 46,
  TEXT_FROM = 11.5; // CSS pixels; WIDEST is of one token
const PROMPT_SHARE = 0.3; // of the width, at most
const GUTTER = { left: 14, right: 14, top: 24, bottom: 10 };
const ANSWER_ROOM = 190, // at most, after the longest path
  GLYPH = 6.7, // CSS pixels
  MOST_LINES = 4000;
const CHIP_TALL = 15, // CSS pixels; a label of its own, where a bar has no room for words
  CHIP_LEAST = 110, // its width
  CHIP_ENOUGH = 360, // for a long text the nearest place of this width is taken, as wide as it is
  CHIP_REACH = 60, // cells above the bar, and as many below
  CELL = 3; // CSS pixels: how finely free places are looked for
const CUT_BELOW = 12; // glyphs of a bar; with fewer, a cut text says nothing
const MONOSPACE = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";

/** Colours of the page's theme, for the canvases. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const colours = {};
  for (const name of [
    "paper",
    "raised",
    "sunken",
    "ink",
    "muted",
    "line",
    "active",
    "idle",
    "host",
    "gone",
    "edge",
    "budget",
    "mark",
    "pick",
    "full",
    "on-active",
    "on-idle",
    "on-host",
  ]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
  return colours;
}

/** A canvas that is as sharp as the screen, and its size in CSS pixels. */
function sharp(canvas) {
  const box = canvas.getBoundingClientRect(),
    ratio = window.devicePixelRatio || 1;
  const width = Math.max(1, Math.round(box.width)),
    height = Math.max(1, Math.round(box.height));
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { pen, width, height, ratio };
}

/** Diagonal lines: the host tier differs from the device without colour too. */
function hatch(pen, colours) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const ink = tile.getContext("2d");
  ink.fillStyle = colours.host;
  ink.fillRect(0, 0, 6, 6);
  ink.strokeStyle = colours.paper;
  ink.globalAlpha = 0.45;
  ink.lineWidth = 1.4;
  ink.beginPath();
  for (const shift of [-6, 0, 6]) {
    ink.moveTo(shift, 6);
    ink.lineTo(shift + 6, 0);
  }
  ink.stroke();
  return pen.createPattern(tile, "repeat");
}

/** Steps of 1, 2 or 5 times a power of ten, about `most` of them in a range. */
function niceStep(range, most) {
  const raw = Math.max(1e-9, range / Math.max(1, most)),
    power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= raw);
}

/**
 * The row of each block. Leaves with the same parent, the same words and the same length share one: in small models
 * most samples of a thought are equal, and a row for each would leave no room for words.
 */
function mergedRows(run) {
  const { count, children, order } = run;
  const first = Int32Array.from({ length: count }, (_, block) => block); // the block that stands for its copies
  const copies = new Map(); // that block -> all of them, itself included
  for (const below of children) {
    if (below.length < 2) continue;
    const same = new Map();
    for (const block of below) {
      const words = line(run.text(block));
      if (!run.leaf[block] || !words) continue;
      const key = `${run.length[block]} ${words}`;
      if (same.has(key)) same.get(key).push(block);
      else same.set(key, [block]);
    }
    for (const group of same.values()) {
      if (group.length < 2) continue;
      const rank = (block) => (run.answerPath[block] ? Infinity : run.lastValue[block] || 0);
      const best = group.reduce((most, block) => (rank(block) > rank(most) ? block : most));
      for (const block of group) first[block] = best;
      copies.set(best, group);
    }
  }
  const row = new Float64Array(count).fill(-1),
    top = new Float64Array(count),
    bottom = new Float64Array(count);
  let rows = 0;
  for (const block of order) {
    top[block] = rows;
    if (!run.leaf[block]) continue;
    if (row[first[block]] < 0) row[first[block]] = rows++;
    row[block] = top[block] = row[first[block]];
    bottom[block] = row[block] + 1;
  }
  for (let i = order.length - 1; i >= 0; i--) {
    const block = order[i];
    if (run.leaf[block]) continue;
    let from = Infinity,
      to = -Infinity;
    for (const child of children[block]) {
      from = Math.min(from, row[child]);
      to = Math.max(to, row[child]);
      bottom[block] = Math.max(bottom[block], bottom[child]);
    }
    row[block] = (from + to) / 2;
  }
  return { row, top, bottom, rows, first, copies };
}

class TreeMap {
  constructor(run, on) {
    this.run = run;
    this.layout = mergedRows(run);
    this.on = on; // select(block), hover(block, x, y)
    this.mode = "spans";
    this.view = null; // {x, y: world at the corner, kx, ky: pixels per token and per row}
    this.canvas = make("canvas", { tabindex: 0, role: "img", class: "map" });
    this.note = make("p", { class: "map-note" });
    this.pane = make("div", { class: "map-pane" }, this.canvas, this.note);
    this._pointers();
  }

  setMode(mode) {
    this.mode = mode;
    this.fit();
  }

  /** The blocks that carry words at any zoom: the answer's path, or the best one, and the best sibling of each. */
  get keyBlocks() {
    if (!this._keyBlocks) {
      const { run, layout } = this;
      const value = (block) => (Number.isFinite(run.lastValue[block]) ? run.lastValue[block] : -1);
      const best = (blocks) =>
        blocks.reduce((most, block) => (most < 0 || value(block) > value(most) ? block : most), -1);
      const leaves = [...run.order].filter((block) => run.leaf[block]);
      const answered = run.answer ? run.blockOf(run.answer.node) : -1;
      const path = run.path(answered >= 0 ? answered : best(leaves));
      const siblings = path.map((block) =>
        best(
          (run.children[run.parent[block]] || []).filter(
            (other) =>
              other !== block && layout.first[other] === other && layout.first[block] !== other && value(other) >= 0,
          ),
        ),
      );
      this._keyBlocks = [...path.reverse(), ...siblings.reverse().filter((block) => block >= 0)];
    }
    return this._keyBlocks;
  }

  // World: x in tokens (levels in the link view), y in rows

  x0(block) {
    return this.mode === "links" ? this.run.depth[block] : this.run.start[block];
  }

  x1(block) {
    return this.mode === "links" ? this.run.depth[block] : this.run.start[block] + this.run.length[block];
  }

  get worldWidth() {
    return this.mode === "links" ? Math.max(1, this.run.levels) : this.run.width;
  }

  sx(x) {
    return GUTTER.left + (x - this.view.x) * this.view.kx;
  }

  sy(y) {
    return GUTTER.top + (y - this.view.y) * this.view.ky;
  }

  /** The whole tree, or one block's subtree. */
  fit(block = -1) {
    const box = this.canvas.getBoundingClientRect();
    const whole = block < 0,
      { run, layout } = this;
    const top = whole ? 0 : layout.top[block],
      bottom = whole ? Math.max(1, layout.rows) : layout.bottom[block];
    const left = whole ? this._promptSeen() : this.x0(block);
    const height = Math.max(40, box.height - GUTTER.top - GUTTER.bottom);
    // thin rows leave a line for the note about them
    const ky = Math.min(TALLEST, (height < THIN * (bottom - top) ? height - 20 : height) / (bottom - top));
    const room = ky >= TEXT_FROM && box.width > 600 ? ANSWER_ROOM : ky >= TEXT_FROM ? 40 : 0;
    const width = Math.max(60, box.width - GUTTER.left - GUTTER.right);
    let kx = this.mode === "links" ? 340 : WIDEST;
    for (let block = 0; block < run.count; block++) {
      // what is written after a leaf must fit too
      const words = run.leaf[block] ? 12 + GLYPH * (5 + (run.answers.get(block) || "").length) : 0;
      const links = this.mode === "links" && run.leaf[block] ? room : 0;
      const after = Math.max(links, Math.min(room, room ? words : 0));
      kx = Math.min(kx, Math.max(60, width - after) / Math.max(1, this.x1(block) - left));
    }
    this.view = { x: left, y: top, kx, ky };
    // a tree that is smaller than its frame stands in the middle of it
    if (whole) this.view.y -= Math.max(0, height / ky - layout.rows) / 2;
    this.fitted = whole;
  }

  /** The first token in the frame of the whole tree: of a long prompt only its end is there. */
  _promptSeen() {
    const { run } = this;
    if (this.mode === "links" || !run.count || run.leaf[0]) return 0;
    const thoughts = run.width - run.length[0];
    return Math.max(0, Math.round(run.length[0] - (PROMPT_SHARE / (1 - PROMPT_SHARE)) * thoughts));
  }

  zoom(factor, x, y, axis = "both") {
    const { view } = this;
    const wx = view.x + (x - GUTTER.left) / view.kx,
      wy = view.y + (y - GUTTER.top) / view.ky;
    if (axis !== "y") view.kx = Math.min(400, Math.max(0.002, view.kx * factor));
    if (axis !== "x") view.ky = Math.min(80, Math.max(0.01, view.ky * factor));
    view.x = wx - (x - GUTTER.left) / view.kx;
    view.y = wy - (y - GUTTER.top) / view.ky;
    this.fitted = false;
  }

  /** Moves the view so that a block is in it. */
  reveal(block) {
    if (block < 0 || !this.view) return;
    const box = this.canvas.getBoundingClientRect(),
      { view } = this;
    const x = this.sx(this.x0(block)),
      y = this.sy(this.layout.row[block] + 0.5);
    if (y < GUTTER.top || y > box.height - GUTTER.bottom)
      view.y = this.layout.row[block] + 0.5 - box.height / view.ky / 2;
    if (x < 0 || x > box.width - 40) view.x = this.x0(block) - 60 / view.kx;
    if (x < 0 || x > box.width - 40 || y < GUTTER.top || y > box.height - GUTTER.bottom) this.fitted = false;
  }

  /** The block under a point of the canvas, or -1. */
  hit(x, y) {
    const { run, view, mode, layout } = this;
    if (!view) return -1;
    const wy = view.y + (y - GUTTER.top) / view.ky;
    let best = -1,
      nearest = Infinity;
    for (let block = 0; block < run.count; block++) {
      const left = this.sx(this.x0(block)),
        right = this.sx(this.x1(block));
      if (mode === "links" ? Math.abs(x - left) > 14 : x < left - 2 || x > right + 2) continue;
      if (mode === "icicle") {
        if (wy >= layout.top[block] && wy < layout.bottom[block]) return block;
        continue;
      }
      const distance = Math.abs(wy - layout.row[block] - 0.5) * view.ky;
      if (distance < Math.max(4, view.ky / 2) && distance < nearest) [best, nearest] = [block, distance];
    }
    return best;
  }

  // Drawing

  draw(scene) {
    const sheet = sharp(this.canvas);
    if (
      !this.view ||
      (this.fitted && (this.fittedWidth !== sheet.width || this.fittedHeight !== sheet.height))
    )
      this.fit();
    this.fittedWidth = sheet.width;
    this.fittedHeight = sheet.height;
    const { pen, width, height } = sheet,
      { colours } = scene;
    pen.clearRect(0, 0, width, height);
    pen.save();
    this.words = []; // what is written into the tree: {block, text, whole, left, top, width, height}
    this.chips = [];
    const size = Math.max(8.5, Math.min(11, this.view.ky - 3));
    scene = {
      ...scene,
      font: `${size}px ${MONOSPACE}`,
      bold: `600 ${size}px ${MONOSPACE}`,
      glyph: (scene.glyph * size) / 11,
      chipGlyph: scene.glyph,
    };
    pen.font = `11px ${MONOSPACE}`;
    pen.textBaseline = "middle";
    if (this.mode !== "links") this._axis(pen, width, height, colours);
    pen.font = scene.font;
    pen.beginPath();
    pen.rect(0, GUTTER.top - 4, width, height - GUTTER.top + 4);
    pen.clip();
    if (this.view.ky < THIN) this._drawMean(sheet, scene);
    else if (this.mode === "links") this._drawLinks(sheet, scene);
    else this._drawBars(sheet, scene);
    this._drawMarks(sheet, scene);
    this._drawChips(sheet, scene);
    pen.restore();
    const apart = 1 / this.view.ky;
    this.note.textContent = !this.run.count
      ? "no blocks in this trace"
      : this.view.ky < THIN
        ? `${count(this.run.rows)} paths, ${apart >= 1.5 ? `about ${apart.toFixed(0)} to a pixel row` : "one to a pixel row"}: zoom in for single blocks`
        : "";
  }

  _axis(pen, width, height, colours) {
    const { view } = this;
    const step = Math.max(1, niceStep((width - GUTTER.left) / view.kx, width / 90));
    pen.fillStyle = colours.muted;
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    pen.textAlign = "left";
    for (let at = Math.max(0, Math.ceil(view.x / step) * step); at <= this.run.width + step; at += step) {
      const x = Math.round(this.sx(at)) + 0.5;
      if (x > width) break;
      pen.beginPath();
      pen.moveTo(x, 4);
      pen.lineTo(x, height);
      pen.stroke();
      pen.fillText(at === 0 ? "token 0" : count(at), x + 4, 10);
    }
  }

  /** Rows [first, last] that are in the frame, as a test for a block. */
  _visible(height) {
    const { view } = this;
    return [view.y - 1, view.y + (height - GUTTER.top) / view.ky + 1];
  }

  _box(block) {
    const { view, run, mode, layout } = this;
    const left = this.sx(this.x0(block)),
      width = Math.max(1.5, this.sx(this.x1(block)) - left - (view.kx * run.length[block] > 8 ? 1.5 : 0));
    if (mode === "icicle") {
      const top = this.sy(layout.top[block]),
        tall = (layout.bottom[block] - layout.top[block]) * view.ky;
      return { left, width, top: top + 0.5, tall: Math.max(1, tall - (tall > 4 ? 1.5 : 0)) };
    }
    const tall = Math.max(2, Math.min(20, view.ky < TEXT_FROM ? view.ky * 0.74 : view.ky - 3));
    return { left, width, top: this.sy(layout.row[block] + 0.5) - tall / 2, tall };
  }

  _drawBars({ pen, width, height }, scene) {
    const { run, view, mode, layout } = this;
    const [first, last] = this._visible(height);
    if (mode === "spans") this._stems(pen, scene, first, last);
    const tight = view.ky < TEXT_FROM;
    for (let block = 0; block < run.count; block++) {
      const over = mode === "icicle" ? layout.bottom[block] : layout.row[block] + 1;
      const under = mode === "icicle" ? layout.top[block] : layout.row[block];
      if (over < first || under > last || layout.first[block] !== block) continue;
      const box = this._box(block);
      if (box.left > width || box.left + box.width < 0) continue;
      pen.globalAlpha = this._dimmed(scene, block) ? 0.22 : 1;
      this._bar(pen, scene, block, box, tight);
    }
    pen.globalAlpha = 1;
  }

  /** A block as it is drawn: itself, or the sum of its copies. */
  _drawn({ state }, block) {
    const copies = this.layout.copies.get(block) || [block];
    const drawn = { copies: 0, tokens: 0, device: 0, host: 0, active: 0, value: NaN, state: UNBORN };
    const states = new Set();
    for (const copy of copies) {
      if (state.state[copy] === UNBORN) continue;
      drawn.copies++;
      drawn.tokens += state.tokens[copy];
      drawn.device += state.device[copy];
      drawn.host += state.host[copy];
      drawn.active ||= state.active[copy];
      states.add(state.state[copy]);
      if (!(drawn.value >= state.value[copy])) drawn.value = state.value[copy];
    }
    for (const each of [OPEN, TERMINAL, CLOSED, PRUNED])
      if (drawn.state === UNBORN && states.has(each)) drawn.state = each;
    return drawn;
  }

  _dimmed(scene, block) {
    return scene.dimmed && !(this.layout.copies.get(block) || [block]).some((copy) => scene.found[copy]);
  }

  /** A block's words, with the number of its copies. */
  _words(block, drawn) {
    if (drawn.state === OPEN) return "decoding";
    const times = drawn.copies > 1 ? ` ×${drawn.copies}` : "";
    return `${line(this.run.text(block)) || `#${this.run.id[block]}`}${times}`;
  }

  /** Vertical lines from the end of a block to its children. */
  _stems(pen, { state, colours }, first, last) {
    const { run, layout } = this;
    pen.lineWidth = 1;
    for (const born of [false, true]) {
      pen.strokeStyle = born ? colours.muted : colours.line;
      pen.beginPath();
      for (let block = 0; block < run.count; block++) {
        const below = run.children[block];
        if (!below.length || layout.bottom[block] < first || layout.top[block] > last) continue;
        const x = Math.round(this.sx(this.x1(block))) - 0.5;
        let from = layout.row[block],
          to = layout.row[block];
        for (const child of below) {
          if ((state.state[child] !== UNBORN) !== born) continue;
          from = Math.min(from, layout.row[child]);
          to = Math.max(to, layout.row[child]);
        }
        if (from === to) continue;
        pen.moveTo(x, this.sy(from + 0.5));
        pen.lineTo(x, this.sy(to + 0.5));
      }
      pen.stroke();
    }
  }

  _bar(pen, scene, block, { left, width, top, tall }, tight) {
    const { colours } = scene,
      { run } = this;
    const drawn = this._drawn(scene, block);
    if (drawn.state === UNBORN) {
      pen.strokeStyle = colours.line;
      pen.lineWidth = 1;
      pen.strokeRect(left + 0.5, top + 0.5, Math.max(0.5, width - 1), tall - 1);
      return;
    }
    const { tokens } = drawn;
    pen.fillStyle = tall >= 6 ? colours.gone : colours.edge; // too thin for an edge of its own
    pen.fillRect(left, top, width, tall);
    pen.strokeStyle = colours.edge;
    pen.lineWidth = 1;
    if (drawn.state === OPEN) {
      // decoding: its length is not known yet
      pen.setLineDash([4, 3]);
      pen.strokeStyle = colours.active;
    }
    if (tall >= 6) pen.strokeRect(left + 0.5, top + 0.5, Math.max(0.5, width - 1), tall - 1);
    pen.setLineDash([]);
    const device = tokens ? (width * drawn.device) / tokens : 0;
    const host = tokens ? (width * drawn.host) / tokens : 0;
    pen.fillStyle = drawn.active ? colours.active : colours.idle;
    pen.fillRect(left, top, Math.min(width, device), tall);
    if (host > 0) {
      pen.fillStyle = scene.hatch;
      pen.fillRect(left + device, top, Math.min(width - device, host), tall);
    }
    if (tight) return;
    const middle = this.mode === "icicle" ? this._inFrame(top, tall) : top + tall / 2;
    if (width > 26) this._label(pen, scene, block, drawn, { left, width, top, tall, middle, device, host });
    if (Number.isFinite(drawn.value) && tall > 8 && this.mode === "spans") {
      pen.fillStyle = colours.ink;
      pen.fillRect(left, top + tall, width * Math.max(0, Math.min(1, drawn.value)), tall > 11 ? 2 : 1.25);
    }
    if (run.leaf[block]) this._ending(pen, scene, block, drawn, left + width, middle);
  }

  _inFrame(top, tall) {
    const bottom = Math.min(top + tall, this.fittedHeight),
      from = Math.max(top, GUTTER.top);
    return (from + bottom) / 2;
  }

  /** The block's text within its bar, in the colour that reads on what is below it; its value, where there is room. */
  _label(pen, scene, block, drawn, { left, width, top, tall, middle, device, host }) {
    const { colours } = scene;
    const pruned = drawn.state === PRUNED;
    const text = this._words(block, drawn);
    const value = Number.isFinite(drawn.value) && !this.run.leaf[block] ? fixed(drawn.value) : "";
    const room = Math.max(1, Math.floor((width - (pruned ? 20 : 8)) / scene.glyph));
    // a key block gives up some of its words for its value
    const kept = value && this.keyBlocks.includes(block) && room >= CUT_BELOW + 6 ? room - 6 : room;
    const shown = this._shortened(text, text.length + value.length + 2 > room ? kept : room);
    const parts = [
      [left, device, drawn.active ? colours["on-active"] : colours["on-idle"]],
      [left + device, host, colours["on-host"]],
      [left + device + host, width - device - host, pruned ? colours.muted : colours.ink],
    ];
    const at = Math.max(left + 5, 4),
      valueAt = left + width - (pruned ? 17 : 5) - value.length * scene.glyph,
      valued = value && at + (shown.length + 1) * scene.glyph <= valueAt;
    pen.textAlign = "left";
    for (const [from, wide, colour] of parts) {
      if (wide < 1) continue;
      pen.save();
      pen.beginPath();
      pen.rect(from, top, Math.min(wide, left + width - from - 2), tall);
      pen.clip();
      pen.fillStyle = colour;
      pen.fillText(shown, at, middle + 0.5);
      if (valued) pen.fillText(value, valueAt, middle + 0.5);
      pen.restore();
    }
    if (pruned) this._cross(pen, colours, left + width - 9, middle);
    this._wrote(block, shown, text, at, middle, shown.length * scene.glyph, tall);
    if (valued) this._wrote(block, value, value, valueAt, middle, value.length * scene.glyph, tall);
  }

  /** A text of at most so many glyphs; the number of copies stays. */
  _shortened(text, most) {
    if (text.length <= most) return text;
    const times = / ×\d+$/.exec(text),
      end = `…${times && most > 12 ? times[0] : ""}`;
    return `${text.slice(0, Math.max(1, most - end.length))}${end}`;
  }

  /** The mark of a pruned block, at its end: words stay legible. */
  _cross(pen, colours, x, y) {
    pen.strokeStyle = colours.muted;
    pen.lineWidth = 1.25;
    pen.beginPath();
    pen.moveTo(x - 2.5, y - 2.5);
    pen.lineTo(x + 2.5, y + 2.5);
    pen.moveTo(x - 2.5, y + 2.5);
    pen.lineTo(x + 2.5, y - 2.5);
    pen.stroke();
  }

  _wrote(block, text, whole, left, middle, width, height) {
    this.words.push({ block, text, whole, left, top: middle - height / 2, width, height });
  }

  /** The answer of the path that a leaf ends, as far as the event knows it; null where it ends none. */
  _answerOf({ state, event }, block) {
    const { run } = this;
    const copies = this.layout.copies.get(block) || [block];
    const ended = copies.find(
      (copy) => state.state[copy] === TERMINAL || (state.state[copy] === PRUNED && run.answers.has(copy)),
    );
    const chosen = event >= run.answeredAt && copies.includes(run.blockOf(run.answer.node));
    if (ended === undefined && !chosen) return null;
    const text = chosen ? line(run.answer.text) || "answer" : line(run.answers.get(ended));
    return { text: text.slice(0, 48), chosen };
  }

  /** The text after a leaf: its value, and the answer of its path. */
  _ending(pen, scene, block, drawn, right, middle) {
    const { colours } = scene;
    const answer = this._answerOf(scene, block);
    if (answer) {
      pen.fillStyle = colours.ink;
      pen.fillRect(right + 1.5, middle - 6, 2.5, 12);
    }
    const value = Number.isFinite(drawn.value) ? fixed(drawn.value) : "";
    let x = right + 9;
    pen.textAlign = "left";
    if (value) {
      pen.fillStyle = colours.muted;
      pen.fillText(value, x, middle + 0.5);
      this._wrote(block, value, value, x, middle, value.length * scene.glyph, 11);
      x += 5 * scene.glyph;
    }
    const room = Math.floor((this.fittedWidth - x - 2) / scene.glyph);
    if (answer && answer.text && room > 3) {
      const text = this._shortened(`${answer.chosen ? "✓ " : ""}${answer.text}`, room);
      pen.fillStyle = answer.chosen ? colours.ink : colours.muted;
      pen.font = answer.chosen ? scene.bold : scene.font;
      pen.fillText(text, x, middle + 0.5);
      this._wrote(block, text, answer.text, x, middle, text.length * scene.glyph, 11);
      pen.font = scene.font;
    }
  }

  /** Labels for the key blocks and the selected one, where their bars have no room for words; none lies on a bar. */
  _drawChips({ pen, width, height }, scene) {
    const { colours } = scene,
      { run, layout } = this,
      glyph = scene.chipGlyph;
    const wanted = scene.selected >= 0 ? [scene.selected, ...this.keyBlocks] : this.keyBlocks;
    const seen = new Set();
    let taken = null; // worked out for the first label
    pen.font = `11px ${MONOSPACE}`;
    pen.textAlign = "left";
    for (let block of wanted) {
      block = layout.first[block];
      if (seen.has(block) || (run.parent[block] < 0 && block !== scene.selected)) continue;
      seen.add(block);
      const drawn = this._drawn(scene, block);
      if (drawn.state === UNBORN || drawn.state === OPEN) continue;
      const text = this._words(block, drawn);
      const words = this.words.filter((word) => word.block === block),
        written = words.find((word) => word.whole === text);
      const valued = !Number.isFinite(drawn.value) || words.some((word) => word.text === fixed(drawn.value));
      if (written && written.text === text && valued) continue;
      const x = this.sx(this.x0(block)),
        y = this.sy(layout.row[block] + 0.5);
      if (x > width || this.sx(this.x1(block)) < 0 || y < GUTTER.top - 4 || y > height) continue;
      const parts = [[text, colours.ink]];
      if (!valued) parts.push([fixed(drawn.value), colours.muted]);
      const answer = run.leaf[block] ? this._answerOf(scene, block) : null;
      if (answer && answer.text && !words.some((word) => word.whole.endsWith(answer.text)))
        parts.push([`${answer.chosen ? "✓ " : "→ "}${answer.text}`, colours.ink]);
      const glyphs = parts.reduce((total, [part]) => total + part.length + 1, -1);
      taken ||= this._taken(width, height);
      const place = this._free(taken, Math.max(4, Math.min(x, width - CHIP_LEAST)), y, glyphs * glyph + 10);
      if (!place || place.wide < CHIP_LEAST) continue;
      const others = parts.slice(1).reduce((total, [part]) => total + part.length + 1, 0);
      const shown = this._shortened(text, Math.floor((place.wide - 10) / glyph) - others);
      // it says no more than the bar does
      if (written && valued && shown.length < written.text.length + CUT_BELOW) continue;
      parts[0][0] = shown;
      const wide = Math.min(place.wide, (shown.length + others) * glyph + 10);
      this._chip(pen, scene, block, { ...place, wide, parts, x, y, glyph });
      this._take(taken, place.left, place.top, wide, CHIP_TALL);
    }
    pen.font = scene.font;
  }

  /** What bars, and words outside of them, cover: a cell is CELL pixels wide and high. */
  _taken(width, height) {
    const { view } = this,
      key = `${this.mode} ${width} ${height} ${view.x} ${view.y} ${view.kx} ${view.ky}`;
    if (this.barsKey !== key) this.bars = this._underBars(width, height); // as long as the view stays
    this.barsKey = key;
    const taken = { ...this.bars, cells: this.bars.cells.slice() };
    for (const word of this.words) this._take(taken, word.left, word.top, word.width, word.height);
    return taken;
  }

  _underBars(width, height) {
    const taken = { wide: Math.ceil(width / CELL), tall: Math.floor(height / CELL) };
    taken.cells = new Uint8Array(taken.wide * taken.tall);
    const { run, layout, view } = this;
    const [first, last] = this._visible(height);
    for (let block = 0; block < run.count; block++) {
      if (layout.bottom[block] < first || layout.top[block] > last || layout.first[block] !== block) continue;
      const { left, width: wide, top, tall } = this._box(block);
      if (this.mode === "links") this._take(taken, left - 10, top, 20, tall);
      else this._take(taken, left, top, wide, Math.max(tall, view.ky < THIN ? 5 : tall + 2));
    }
    return taken;
  }

  _take({ cells, wide, tall }, left, top, width, height) {
    const from = Math.max(0, Math.floor(left / CELL)),
      to = Math.min(wide, Math.ceil((left + width) / CELL));
    const end = Math.min(tall, Math.ceil((top + height) / CELL));
    for (let row = Math.max(0, Math.floor(top / CELL)); row < end; row++)
      if (to > from) cells.fill(1, row * wide + from, row * wide + to);
  }

  /** The free place nearest to a bar that is wide enough, or the widest one near it; null without any. */
  _free({ cells, wide, tall }, left, y, wanted) {
    const rows = Math.ceil((CHIP_TALL + 2) / CELL),
      home = Math.round((y - CHIP_TALL / 2) / CELL),
      from = Math.floor(left / CELL);
    let best = null;
    for (let attempt = 0; attempt <= 2 * CHIP_REACH; attempt++) {
      const row = home + Math.ceil(attempt / 2) * (attempt % 2 ? 1 : -1);
      if (row * CELL < GUTTER.top || row + rows > tall) continue;
      let to = wide - 1;
      for (let each = row; each < row + rows && to > from; each++) {
        const stop = cells.subarray(each * wide + from, each * wide + to).indexOf(1);
        if (stop >= 0) to = from + stop;
      }
      const room = (to - from) * CELL - 4;
      if (!best || Math.min(room, wanted) > best.wide)
        best = { left, top: row * CELL + 1, wide: Math.min(room, wanted) };
      if (room >= Math.min(wanted, CHIP_ENOUGH)) break;
    }
    return best;
  }

  _chip(pen, { colours, selected }, block, { left, top, wide, parts, x, y, glyph }) {
    const middle = top + CHIP_TALL / 2;
    const picked = selected >= 0 && this.layout.first[selected] === block;
    pen.strokeStyle = picked ? colours.pick : this.run.answerPath[block] ? colours.ink : colours.edge;
    pen.lineWidth = 1;
    if (Math.abs(middle - y) > CHIP_TALL / 2) {
      pen.beginPath(); // from a label that had to move to its bar
      pen.moveTo(Math.max(x, left) + 3, y);
      pen.lineTo(Math.max(x, left) + 3, middle);
      pen.stroke();
    }
    pen.fillStyle = colours.paper;
    pen.beginPath();
    pen.roundRect(left, top, wide, CHIP_TALL, 3);
    pen.fill();
    pen.stroke();
    pen.save();
    pen.clip();
    let at = left + 5;
    for (const [text, colour] of parts) {
      pen.fillStyle = colour;
      pen.fillText(text, at, middle + 0.5);
      this._wrote(block, text, text, at, middle, text.length * glyph, CHIP_TALL);
      at += (text.length + 1) * glyph;
    }
    pen.restore();
    this.chips.push({ block, left, top, width: wide, height: CHIP_TALL });
  }

  _drawLinks({ pen, width, height }, scene) {
    const { run, view, layout } = this,
      { colours, state } = scene;
    const [first, last] = this._visible(height);
    pen.lineWidth = 1;
    for (let block = 0; block < run.count; block++) {
      const parent = run.parent[block];
      if (
        parent < 0 ||
        Math.max(layout.row[block], layout.row[parent]) < first ||
        Math.min(layout.row[block], layout.row[parent]) > last
      )
        continue;
      const [x0, y0] = [this.sx(this.x1(parent)), this.sy(layout.row[parent] + 0.5)];
      const [x1, y1] = [this.sx(this.x0(block)), this.sy(layout.row[block] + 0.5)];
      pen.globalAlpha = scene.dimmed && !scene.found[block] ? 0.22 : 1;
      pen.strokeStyle =
        state.state[block] === UNBORN ? colours.line : state.active[block] ? colours.active : colours.muted;
      pen.lineWidth = state.active[block] ? 1.75 : 1;
      pen.beginPath();
      pen.moveTo(x0, y0);
      pen.bezierCurveTo((x0 + x1) / 2, y0, (x0 + x1) / 2, y1, x1, y1);
      pen.stroke();
    }
    const radius = this._radius();
    for (let block = 0; block < run.count; block++) {
      if (layout.row[block] < first || layout.row[block] > last || layout.first[block] !== block) continue;
      const drawn = this._drawn(scene, block);
      const x = this.sx(this.x0(block)),
        y = this.sy(layout.row[block] + 0.5);
      if (x < -20 || x > width + 20) continue;
      pen.globalAlpha = this._dimmed(scene, block) ? 0.22 : 1;
      this._disc(pen, scene, drawn, x, y, radius);
      if (view.ky < TEXT_FROM || drawn.state === UNBORN) continue;
      const room = run.leaf[block] ? 200 : view.kx - 2 * radius - 14;
      const text = this._words(block, drawn);
      const most = Math.floor(room / scene.glyph);
      pen.textAlign = "left";
      pen.fillStyle = colours.paper;
      if (!run.leaf[block])
        pen.fillRect(x + radius + 3, y - 7, Math.min(text.length, most) * scene.glyph + 4, 14);
      pen.fillStyle = drawn.state === PRUNED ? colours.muted : colours.ink;
      if (most <= 3) continue;
      const shown = this._shortened(text, most);
      pen.fillText(shown, x + radius + 5, y + 0.5);
      this._wrote(block, shown, text, x + radius + 5, y, shown.length * scene.glyph, 11);
    }
    pen.globalAlpha = 1;
  }

  _radius() {
    return Math.max(2.2, Math.min(9, this.view.ky * 0.42));
  }

  /** A node as a disc of which as much is filled as there is KV. */
  _disc(pen, { colours, hatch }, drawn, x, y, radius) {
    if (drawn.state === UNBORN) {
      pen.strokeStyle = colours.line;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.arc(x, y, radius, 0, 2 * Math.PI);
      pen.stroke();
      return;
    }
    const tokens = drawn.tokens || 1,
      from = -Math.PI / 2;
    const device = (2 * Math.PI * drawn.device) / tokens,
      host = (2 * Math.PI * drawn.host) / tokens;
    const wedge = (start, angle, fill) => {
      if (angle <= 0) return;
      pen.fillStyle = fill;
      pen.beginPath();
      pen.moveTo(x, y);
      pen.arc(x, y, radius, start, start + angle);
      pen.fill();
    };
    wedge(0, 2 * Math.PI, colours.gone);
    wedge(from, device, drawn.active ? colours.active : colours.idle);
    wedge(from + device, host, hatch);
    pen.strokeStyle = drawn.state === OPEN ? colours.active : colours.muted;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.arc(x, y, radius, 0, 2 * Math.PI);
    pen.stroke();
    if (drawn.state === PRUNED) {
      pen.strokeStyle = colours.ink;
      pen.beginPath();
      pen.moveTo(x - radius, y + radius);
      pen.lineTo(x + radius, y - radius);
      pen.stroke();
    }
  }

  /** Rows thinner than a few pixels: every pixel gets the mean colour of the tokens that fall on it. */
  _drawMean({ pen, width, height }, scene) {
    const { run, view, mode, layout } = this,
      { state, colours } = scene;
    const wide = width,
      tall = height - GUTTER.top;
    if (tall <= 0) return;
    if (!this.sheet || this.sheet.width !== wide || this.sheet.height !== tall) {
      this.counts = new Float64Array(wide * tall);
      this.sheet = document.createElement("canvas");
      this.sheet.width = wide;
      this.sheet.height = tall;
      this.image = new ImageData(wide, tall);
    }
    const { counts, image } = this;
    counts.fill(0);
    if (mode === "links" && run.count <= MOST_LINES) this._lines(pen, colours);
    const thick = Math.max(1, Math.round(view.ky));
    for (let block = 0; block < run.count; block++) {
      let left = this.sx(this.x0(block)),
        right = this.sx(this.x1(block));
      if (mode === "links") {
        left -= 3;
        right += 3;
      }
      left = Math.round(left);
      right = Math.max(left + 1, Math.round(right));
      if (right <= 0 || left >= wide) continue;
      let top, bottom;
      if (mode === "icicle") {
        top = Math.round((layout.top[block] - view.y) * view.ky);
        bottom = Math.max(top + 1, Math.round((layout.bottom[block] - view.y) * view.ky));
      } else {
        // a trunk that many share must not vanish: it gets up to five pixels
        const more = Math.min(4, Math.floor(Math.log2(1 + (layout.bottom[block] - layout.top[block]))));
        top = Math.round((layout.row[block] + 0.5 - view.y) * view.ky) - (more >> 1);
        bottom = top + thick + more;
      }
      if (bottom <= 0 || top >= tall) continue;
      const born = state.state[block] !== UNBORN,
        tokens = born ? state.tokens[block] : 0;
      // left [ device ) held [ host ) kept [ gone ) right; all of it is gone while its tokens are not counted
      const held = left + (tokens ? Math.round(((right - left) * state.device[block]) / tokens) : 0);
      const kept = held + (tokens ? Math.round(((right - left) * state.host[block]) / tokens) : 0);
      const device = state.active[block] ? RUNNING : IDLE,
        gone = born ? GONE : GHOST;
      const from = Math.max(0, left),
        to = Math.min(wide, right);
      for (let y = Math.max(0, top); y < Math.min(tall, bottom); y++) {
        const row = y * wide;
        for (let x = from; x < to; x++) counts[row + x] += x < held ? device : x < kept ? ONHOST : gone;
      }
    }
    const shades = [colours.line, colours.edge, colours.idle, colours.host, colours.active].map(rgb);
    const pixels = new Uint32Array(image.data.buffer);
    let last = 0,
      word = 0;
    for (let pixel = 0; pixel < pixels.length; pixel++) {
      // neighbours mostly show the same
      if (counts[pixel] !== last) {
        last = counts[pixel];
        word = mean(last, shades);
      }
      pixels[pixel] = word;
    }
    this.sheet.getContext("2d").putImageData(image, 0, 0);
    pen.drawImage(this.sheet, 0, GUTTER.top, wide, tall);
  }

  /** Links too dense for curves. */
  _lines(pen, colours) {
    const { run, layout } = this;
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    pen.beginPath();
    for (let block = 0; block < run.count; block++) {
      const parent = run.parent[block];
      if (parent < 0) continue;
      pen.moveTo(this.sx(this.x1(parent)), this.sy(layout.row[parent] + 0.5));
      pen.lineTo(this.sx(this.x0(block)), this.sy(layout.row[block] + 0.5));
    }
    pen.stroke();
  }

  /** Marks over the tree: the answer's path, blocks of the event, found, selected and hovered blocks. */
  _drawMarks({ pen, width }, scene) {
    const { run, layout } = this,
      { colours } = scene;
    const outline = (block, colour, line, grow) => {
      pen.strokeStyle = colour;
      pen.lineWidth = line;
      if (this.mode === "links") {
        const radius = this._radius() + grow;
        pen.beginPath();
        pen.arc(this.sx(this.x0(block)), this.sy(layout.row[block] + 0.5), radius, 0, 2 * Math.PI);
        pen.stroke();
        return;
      }
      const { left, width: wide, top, tall } = this._box(block);
      if (left > width || left + wide < 0) return;
      pen.strokeRect(left - grow + 0.5, top - grow + 0.5, wide + 2 * grow - 1, tall + 2 * grow - 1);
    };
    if (scene.event >= run.answeredAt) {
      for (let block = 0; block < run.count; block++) {
        if (run.answerPath[block]) outline(block, colours.ink, this.view.ky < THIN ? 1 : 1.75, 0.5);
      }
    }
    if (scene.dimmed && this.view.ky < THIN) {
      for (let block = 0; block < run.count; block++)
        if (scene.found[block]) outline(block, colours.mark, 1, 1);
    }
    for (const block of scene.touched) outline(block, colours.mark, 2, 2);
    if (scene.hover >= 0) outline(scene.hover, colours.ink, 1, 1.5);
    if (scene.selected >= 0) {
      outline(scene.selected, colours.paper, 4, 3);
      outline(scene.selected, colours.pick, 2.25, 3);
    }
  }

  // Pointers: drag pans, two fingers and the wheel zoom, a click selects

  _pointers() {
    const { canvas } = this,
      down = new Map();
    let moved = 0;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      down.set(event.pointerId, place(event));
      if (down.size === 1) moved = 0;
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = place(event),
        from = down.get(event.pointerId);
      if (!from) {
        this.on.hover(this.hit(x, y), event.clientX, event.clientY);
        return;
      }
      moved += Math.abs(x - from[0]) + Math.abs(y - from[1]);
      if (down.size === 2) {
        const [other] = [...down.entries()].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
        const apart = Math.hypot(from[0] - other[0], from[1] - other[1]);
        if (apart > 10)
          this.zoom(Math.hypot(x - other[0], y - other[1]) / apart, (x + other[0]) / 2, (y + other[1]) / 2);
      } else if (moved > 4) {
        this.view.x -= (x - from[0]) / this.view.kx;
        this.view.y -= (y - from[1]) / this.view.ky;
        this.fitted = false;
        canvas.classList.add("panning");
      }
      down.set(event.pointerId, [x, y]);
      this.on.moved();
    });
    const up = (event) => {
      if (down.delete(event.pointerId) && moved <= 4 && event.type === "pointerup") {
        this.on.select(this.hit(...place(event)));
      }
      canvas.classList.remove("panning");
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", () => this.on.hover(-1, 0, 0));
    canvas.addEventListener("dblclick", (event) => {
      this.fit(this.hit(...place(event)));
      this.on.moved();
    });
    canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        const pixels = event.deltaMode === 1 ? event.deltaY * 16 : event.deltaY;
        const axis = event.ctrlKey ? "both" : event.shiftKey ? "x" : "y"; // a pinch of a touchpad arrives with ctrl
        this.zoom(Math.exp(-(pixels || event.deltaX) / 400), ...place(event), axis);
        this.on.moved();
      },
      { passive: false },
    );
  }
}

// How many blocks of each kind fall on a pixel, in one number: ten bits a kind.
const GHOST = 1,
  GONE = 2 ** 10,
  IDLE = 2 ** 20,
  ONHOST = 2 ** 30,
  RUNNING = 2 ** 40;

/** The mean colour of what falls on a pixel, as the word that a pixel is. */
function mean(counts, shades) {
  if (counts === 0) return 0;
  if (counts >= RUNNING) return shades[4].word; // a running path stays visible whatever else falls there
  const born = counts >= GONE;
  let total = 0,
    red = 0,
    green = 0,
    blue = 0;
  for (const shade of shades) {
    const here = counts % 1024;
    counts = (counts - here) / 1024;
    total += here;
    red += here * shade[0];
    green += here * shade[1];
    blue += here * shade[2];
  }
  const alpha = born ? 255 : 150;
  return ((alpha << 24) | ((blue / total) << 16) | ((green / total) << 8) | (red / total)) >>> 0;
}

/** "#rrggbb" as numbers, and as the word that a pixel of it is. */
function rgb(colour) {
  const value = parseInt(colour.slice(1), 16);
  const parts = [value >> 16, (value >> 8) & 255, value & 255];
  parts.word = ((255 << 24) | (parts[2] << 16) | (parts[1] << 8) | parts[0]) >>> 0;
  return parts;
}
