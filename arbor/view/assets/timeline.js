// timeline.js: KV over the run. The device has a strip with the budget's line; lower tiers have a strip and a scale of
// their own, because stacked on the device they would make the budget's line lie. Marks for what moved KV lie below.

const EDGE = { left: 70, right: 16 };
const HOST_TALL = 38,
  LANE_TALL = 10; // CSS pixels
const LANES = [
  ["pressure", "pressure", "budget"],
  ["evict", "evict", "muted"],
  ["rehydrate", "rehydrate", "mark"],
  ["transition", "transition", "active"],
];
const FAR = 1.6; // times what was used, from which the budget's line leaves the strip
const GLYPHS_UNTIL = 160; // marks of a lane that still get a shape of their own

class Strip {
  constructor(run, tall, on) {
    this.run = run;
    this.tall = tall; // of the device's part, CSS pixels
    this.on = on; // seek(event), hover(event, x, y)
    this.canvas = make("canvas", { role: "img", class: "strip" });
    this.hosted = run.hostAt.some((tokens) => tokens > 0) || run.compressedAt.some((tokens) => tokens > 0);
    this.lanes = LANES.filter(([type]) => run.records.some((record) => record.e === type));
    this.height = this.tall + (this.hosted ? HOST_TALL : 0) + this.lanes.length * LANE_TALL + 10;
    this.canvas.style.height = `${this.height}px`;
    this.pane = make("div", { class: "strip-pane" }, this.canvas);
    this._pointers();
  }

  /** Tokens that need room on the device's scale: budget and peak, and what every block together would hold. */
  get needs() {
    const { run } = this;
    const used = run.poolAt.reduce((most, tokens) => Math.max(most, tokens), 1);
    const full = run.fullAt.reduce((most, tokens) => Math.max(most, tokens), 0);
    // a budget far above all use leaves the strip: it would flatten what there is to see
    return { peak: run.budget > FAR * used ? used : Math.max(used, run.budget), full };
  }

  /** Sets the tokens at the top of the strip, for all strips the same; what all blocks would hold may leave it. */
  setScale(peak, full) {
    this.most = Math.max(1, full <= 1.35 * peak ? Math.max(peak, full) * 1.04 : peak * 1.3);
    this.layer = null;
  }

  /** The largest place on the axis that all strips share. */
  setAxis(axis, end) {
    this.axis = axis;
    this.axisEnd = end || 1;
    this.layer = null;
  }

  x(event) {
    return this.xOf(this.run.axes[this.axis][event]);
  }

  xOf(place) {
    return EDGE.left + (place / this.axisEnd) * (this.wide - EDGE.left - EDGE.right);
  }

  eventAt(x) {
    const place = ((x - EDGE.left) / (this.wide - EDGE.left - EDGE.right)) * this.axisEnd;
    return this.run.eventAt(this.axis, Math.min(this.axisEnd, Math.max(0, place)));
  }

  draw(scene) {
    const { pen, width, height, ratio } = sharp(this.canvas);
    this.wide = width;
    const key = [width, height, ratio, this.axis, this.axisEnd, scene.theme].join();
    if (!this.layer || this.layerKey !== key) {
      this.layer = document.createElement("canvas");
      this.layer.width = this.canvas.width;
      this.layer.height = this.canvas.height;
      const ink = this.layer.getContext("2d");
      ink.setTransform(ratio, 0, 0, ratio, 0, 0);
      this._paint(ink, width, scene);
      this.layerKey = key;
    }
    pen.clearRect(0, 0, width, height);
    pen.drawImage(this.layer, 0, 0, width, height);
    const x = this.x(scene.event),
      y = this._y(this.run.deviceAt[scene.event]);
    pen.strokeStyle = scene.colours.ink;
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(x, 2);
    pen.lineTo(x, height - 4);
    pen.stroke();
    pen.fillStyle = scene.colours.ink;
    pen.beginPath();
    pen.arc(x, y, 3.5, 0, 2 * Math.PI);
    pen.fill();
    this._reading(pen, scene, x, y, width);
  }

  /** The number at the cursor, on the side with room. */
  _reading(pen, scene, x, y, width) {
    const { run } = this;
    const others = run.shares ? ` · all ${count(run.poolAt[scene.event])}` : "";
    const text = count(run.deviceAt[scene.event]) + others;
    pen.font = scene.bold;
    const wide = pen.measureText(text).width + 10,
      left = x + wide + 10 > width ? x - wide - 7 : x + 7;
    const top = Math.min(Math.max(4, y - 9), this.tall - 18);
    pen.fillStyle = scene.colours.ink;
    pen.beginPath();
    pen.roundRect(left, top, wide, 17, 4);
    pen.fill();
    pen.fillStyle = scene.colours.paper;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.fillText(text, left + 5, top + 9);
  }

  _y(tokens) {
    return this.tall - (this.tall - 12) * Math.min(1.02, tokens / this.most);
  }

  /** For each pixel column the events where most is held, by this problem and by all that share the budget. */
  _columns(width) {
    const { run } = this,
      from = EDGE.left,
      wide = Math.max(1, width - EDGE.left - EDGE.right);
    const columns = [];
    let event = 0;
    for (let pixel = 0; pixel < wide; pixel++) {
      const place = ((pixel + 1) / wide) * this.axisEnd;
      let top = event,
        pool = event;
      let next = event;
      while (next < run.events && run.axes[this.axis][next] < place) {
        if (run.deviceAt[next] >= run.deviceAt[top]) top = next;
        if (run.poolAt[next] >= run.poolAt[pool]) pool = next;
        next++;
      }
      const last = Math.max(0, next - 1);
      if (next === event && pixel > 0) top = pool = last;
      columns.push({
        x: from + pixel,
        top,
        pool,
        last,
        ended: next >= run.events && run.axes[this.axis][run.events - 1] < (pixel / wide) * this.axisEnd,
      });
      event = Math.max(event, last);
    }
    return columns;
  }

  _paint(pen, width, scene) {
    const { run } = this,
      { colours } = scene;
    pen.font = scene.small;
    pen.textBaseline = "middle";
    const columns = this._columns(width);
    const base = this.tall;
    if (run.shares) this._pool(pen, width, columns, colours);
    for (const { x, top, ended } of columns) {
      if (ended) break;
      const held = this._y(run.deviceAt[top]),
        running = this._y(run.activeAt[top]);
      pen.fillStyle = colours.idle;
      pen.fillRect(x, held, 1, base - held);
      pen.fillStyle = colours.active;
      pen.fillRect(x, running, 1, base - running);
    }
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(EDGE.left, base + 0.5);
    pen.lineTo(width - EDGE.right, base + 0.5);
    pen.stroke();
    this._fullLine(pen, width, colours, columns);
    this._budgetLine(pen, width, colours);
    pen.fillStyle = colours.muted;
    pen.textAlign = "right";
    pen.fillText("device", EDGE.left - 8, 12);
    pen.fillText("0", EDGE.left - 8, base - 3);
    let y = base + 6;
    if (this.hosted) {
      this._hostStrip(pen, width, colours, columns, y);
      y += HOST_TALL;
    }
    for (const [type, label, colour] of this.lanes) {
      this._lane(pen, type, colours[colour], y + LANE_TALL / 2, width);
      pen.fillStyle = colours.muted;
      pen.textAlign = "right";
      pen.fillText(label, EDGE.left - 8, y + LANE_TALL / 2 + 0.5);
      y += LANE_TALL;
    }
  }

  /** What all problems that share the budget hold, behind what this one does. */
  _pool(pen, width, columns, colours) {
    const { run } = this;
    let most = 0;
    for (const { x, pool, ended } of columns) {
      if (ended) break;
      const y = this._y(run.poolAt[pool]);
      pen.fillStyle = colours.sunken;
      pen.fillRect(x, y, 1, this.tall - y);
      pen.fillStyle = colours.edge;
      pen.fillRect(x, y, 1, 1.5);
      most = Math.max(most, run.poolAt[pool]);
    }
    const text = `all problems: up to ${count(most)}`;
    const left = (EDGE.left + width - EDGE.right - pen.measureText(text).width) / 2;
    this._tag(pen, text, left, Math.max(9, this._y(most) + 9), colours.muted, colours);
  }

  _budgetLine(pen, width, colours) {
    const { run } = this;
    if (!run.budget) return;
    pen.textAlign = "left";
    if (run.budget > this.most) {
      pen.fillStyle = colours.budget;
      pen.fillText(`budget ${count(run.budget)} ↑`, EDGE.left + 4, 8);
      return;
    }
    const y = Math.round(this._y(run.budget)) + 0.5;
    pen.strokeStyle = colours.budget;
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(EDGE.left, y);
    pen.lineTo(width - EDGE.right, y);
    pen.stroke();
    this._tag(
      pen,
      `budget ${count(run.budget)}`,
      EDGE.left + 4,
      y - 8 < 4 ? y + 9 : y - 8,
      colours.budget,
      colours,
    );
  }

  /** What keeping every block would hold; where it leaves the strip, an arrow and its end. */
  _fullLine(pen, width, colours, columns) {
    const { run } = this;
    pen.strokeStyle = colours.full;
    pen.setLineDash([5, 3]);
    pen.lineWidth = 1.5;
    pen.beginPath();
    let pen_down = false,
      leaves = null;
    for (const { x, last, ended } of columns) {
      if (ended) break;
      if (run.fullAt[last] > this.most) {
        leaves = x;
        break;
      }
      const y = this._y(run.fullAt[last]);
      if (pen_down) pen.lineTo(x, y);
      else pen.moveTo(x, y);
      pen_down = true;
    }
    if (leaves !== null) pen.lineTo(leaves, 2);
    pen.stroke();
    pen.setLineDash([]);
    const text =
      leaves === null ? `all kept ${count(this.needs.full)}` : `all kept: up to ${count(this.needs.full)} ↑`;
    const wide = pen.measureText(text).width + 8;
    const right = width - EDGE.right - wide;
    const at = leaves === null ? right : Math.min(leaves + 6, right);
    const y = leaves === null ? this._y(this.needs.full) : 8;
    this._tag(pen, text, at, leaves === null ? (y < 14 ? y + 10 : y - 8) : y, colours.full, colours);
  }

  _tag(pen, text, x, y, colour, colours) {
    pen.textAlign = "left";
    pen.fillStyle = colours.paper;
    pen.globalAlpha = 0.82;
    pen.fillRect(x - 2, y - 6, pen.measureText(text).width + 4, 12);
    pen.globalAlpha = 1;
    pen.fillStyle = colour;
    pen.fillText(text, x, y + 0.5);
  }

  _hostStrip(pen, width, colours, columns, top) {
    const { run } = this,
      tall = HOST_TALL - 8,
      base = top + tall;
    let most = 1;
    for (let event = 0; event < run.events; event++)
      most = Math.max(most, run.hostAt[event] + run.compressedAt[event]);
    for (const { x, last, ended } of columns) {
      if (ended) break;
      const both = (tall * (run.hostAt[last] + run.compressedAt[last])) / most,
        packed = (tall * run.compressedAt[last]) / most;
      pen.fillStyle = colours.host;
      pen.fillRect(x, base - both, 1, both);
      pen.fillStyle = colours.muted;
      pen.fillRect(x, base - packed, 1, packed);
    }
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(EDGE.left, base + 0.5);
    pen.lineTo(width - EDGE.right, base + 0.5);
    pen.stroke();
    pen.fillStyle = colours.muted;
    pen.textAlign = "right";
    pen.fillText("host", EDGE.left - 8, top + 6);
    pen.fillText(count(most), EDGE.left - 8, top + 18);
  }

  _lane(pen, type, colour, y) {
    const { run } = this;
    const marks = type === "transition" ? run.ofType("transition") : run.ofType(type);
    const back = new Set(run.backtracks);
    pen.fillStyle = colour;
    pen.strokeStyle = colour;
    const shapes = marks.length <= GLYPHS_UNTIL;
    if (!shapes) return this._dense(pen, marks, y);
    for (const event of marks) {
      const x = this.x(event);
      if (type === "pressure") {
        pen.beginPath();
        pen.moveTo(x, y - 3.5);
        pen.lineTo(x + 3.5, y + 3);
        pen.lineTo(x - 3.5, y + 3);
        pen.fill();
      } else if (type === "evict") {
        pen.beginPath();
        pen.moveTo(x, y + 3.5);
        pen.lineTo(x + 3.5, y - 3);
        pen.lineTo(x - 3.5, y - 3);
        pen.fill();
      } else if (type === "rehydrate") {
        pen.beginPath();
        pen.moveTo(x, y - 4);
        pen.lineTo(x + 3.5, y);
        pen.lineTo(x, y + 4);
        pen.lineTo(x - 3.5, y);
        pen.fill();
      } else if (back.has(event)) {
        pen.lineWidth = 1.5;
        pen.beginPath();
        pen.moveTo(x + 3, y - 3);
        pen.lineTo(x - 2, y);
        pen.lineTo(x + 3, y + 3);
        pen.stroke();
      } else {
        pen.fillRect(x - 0.5, y - 3, 1.5, 6);
      }
    }
  }

  /** More marks than have room: each pixel as dark as there are marks in it. */
  _dense(pen, marks, y) {
    const counts = new Map();
    for (const event of marks) {
      const x = Math.round(this.x(event));
      counts.set(x, (counts.get(x) || 0) + 1);
    }
    const most = Math.max(...counts.values());
    for (const [x, here] of counts) {
      pen.globalAlpha = 0.25 + (0.75 * here) / most;
      pen.fillRect(x, y - 3, 1, 6);
    }
    pen.globalAlpha = 1;
  }

  _pointers() {
    const { canvas } = this;
    let held = false;
    const at = (event) => this.eventAt(event.clientX - canvas.getBoundingClientRect().left);
    canvas.addEventListener("pointerdown", (event) => {
      held = true;
      canvas.setPointerCapture(event.pointerId);
      this.on.seek(at(event));
    });
    canvas.addEventListener("pointermove", (event) => {
      if (held) this.on.seek(at(event));
      this.on.hover(at(event), event.clientX, event.clientY);
    });
    for (const end of ["pointerup", "pointercancel"])
      canvas.addEventListener(end, () => {
        held = false;
      });
    canvas.addEventListener("pointerleave", () => this.on.hover(-1, 0, 0));
  }
}
