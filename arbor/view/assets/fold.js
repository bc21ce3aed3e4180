// fold.js: a run as typed arrays. What never changes is kept once, what changes as a log with keyframes,
// so that the state at any event is the nearest keyframe and a few entries of the log.

const OPEN = 0,
  CLOSED = 1,
  TERMINAL = 2,
  PRUNED = 3,
  UNBORN = 4;
const STATES = ["open", "closed", "terminal", "pruned", "unborn"];
const DEVICE = 0,
  HOST = 1,
  TOKENS = 2,
  STATE = 3,
  VALUE = 4; // fields of the log
const PROSE = 80; // characters of a thought
const MOST_KEYFRAMES = 64,
  LEAST_APART = 256;

/** The data of one script element: JSON, packed by gzip, in base64. */
async function unpack(element) {
  const text = element.textContent.trim();
  const bytes = Uint8Array.fromBase64
    ? Uint8Array.fromBase64(text)
    : Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// events between the pieces of a prompt; any other known one means that all of it is computed
const BETWEEN_PIECES = new Set(["pressure", "allocate", "evict"]);

const isCount = (value) => Number.isSafeInteger(value);
const list = (value) => (Array.isArray(value) ? value : []);
const number = (value) => (typeof value === "number" ? value : NaN);

/** [id, count, ...] rows of a field, as pairs. */
function pairs(value) {
  const found = [];
  for (const row of list(value)) {
    if (Array.isArray(row) && isCount(row[0])) found.push([row[0], isCount(row[1]) ? row[1] : 0]);
  }
  return found;
}

/** What all blocks are like at one event. */
class State {
  constructor(count) {
    this.event = -1;
    this.device = new Int32Array(count);
    this.host = new Int32Array(count);
    this.tokens = new Int32Array(count);
    this.state = new Uint8Array(count).fill(UNBORN);
    this.value = new Float64Array(count).fill(NaN);
    this.active = new Uint8Array(count); // on a running path
  }

  copy(other) {
    this.event = other.event;
    this.device.set(other.device);
    this.host.set(other.host);
    this.tokens.set(other.tokens);
    this.state.set(other.state);
    this.value.set(other.value);
  }

  set(field, block, value) {
    if (field === DEVICE) this.device[block] = value;
    else if (field === HOST) this.host[block] = value;
    else if (field === TOKENS) this.tokens[block] = value;
    else if (field === STATE) this.state[block] = value;
    else this.value[block] = value;
  }
}

/** One run: its structure, its log, and what the timeline shows. */
class Run {
  constructor(data) {
    this.name = data.name;
    this.banner = data.banner;
    this.records = data.records;
    this.events = this.records.length;
    this.header = this.records.find((record) => record.e === "header") || {};
    this.plan = this.header.kv || {};
    this.answer = this.records.findLast((record) => record.e === "answer") || null;
    this.end = this.records.findLast((record) => record.e === "end") || null;
    this._structure();
    this._fold();
    this._layout();
    this._axes();
    this.answeredAt = this.answer ? this.records.indexOf(this.answer) : Infinity;
    this.answers = new Map(); // block -> answer of its path
    for (const event of this.ofType("terminal")) {
      const { node, answer } = this.records[event];
      if (this.index.has(node) && typeof answer === "string") this.answers.set(this.index.get(node), answer);
    }
    this.answerPath = new Uint8Array(this.count);
    for (const id of list(this.answer && this.answer.path)) {
      if (this.index.has(id)) this.answerPath[this.index.get(id)] = 1;
    }
  }

  /** Events of one type. */
  ofType(type) {
    this._types ||= new Map();
    if (!this._types.has(type)) {
      const found = [];
      this.records.forEach((record, event) => {
        if (record.e === type) found.push(event);
      });
      this._types.set(type, Int32Array.from(found));
    }
    return this._types.get(type);
  }

  _mostAllowed() {
    this._allowed ??= this.ofType("limit").reduce(
      (most, event) => Math.max(most, this.records[event].tokens),
      0,
    );
    return this._allowed;
  }

  get budget() {
    const { pool_tokens: pool, budget_tokens: budget, part } = this.plan;
    if (part < 1) return this._mostAllowed(); // a part of full retention moves as the search goes on
    return isCount(pool) ? pool : isCount(budget) ? budget : 0; // of all searches that share it
  }

  // Structure: one entry a block, in the order they were opened

  _structure() {
    const opened = [];
    this.index = new Map(); // id -> block
    this.records.forEach((record, event) => {
      if (record.e === "node" && isCount(record.node) && !this.index.has(record.node)) {
        this.index.set(record.node, opened.length);
        opened.push(event);
      }
    });
    const count = (this.count = opened.length);
    this.opened = Int32Array.from(opened); // event
    this.closed = new Int32Array(count).fill(-1); // event
    this.id = new Int32Array(count);
    this.parent = new Int32Array(count);
    this.depth = new Int32Array(count);
    this.children = Array.from({ length: count }, () => []);
    for (let block = 0; block < count; block++) {
      const record = this.records[opened[block]];
      this.id[block] = record.node;
      const parent = this.index.get(record.parent);
      // a parent that was lost, or that comes later, makes the block a root of its own
      this.parent[block] = parent === undefined || parent >= block ? -1 : parent;
      this.depth[block] = isCount(record.depth) ? record.depth : 0;
      if (this.parent[block] >= 0) this.children[this.parent[block]].push(block);
    }
  }

  blockOf(id) {
    const block = this.index.get(id);
    return block === undefined ? -1 : block;
  }

  recordOf(block) {
    return this.records[this.opened[block]];
  }

  closing(block) {
    return this.closed[block] < 0 ? null : this.records[this.closed[block]];
  }

  text(block) {
    const closing = this.closing(block) || {};
    const text = closing.text || this.recordOf(block).text;
    return typeof text === "string" ? text : "";
  }

  /** Whether the thoughts are too long for bars and labels. */
  get prose() {
    this._prose ??= this.order.some((block) => this.parent[block] >= 0 && line(this.text(block)).length > PROSE);
    return this._prose;
  }

  /** Blocks from the root to this one. */
  path(block) {
    const found = [];
    for (let at = block; at >= 0; at = this.parent[at]) found.push(at);
    return found.reverse();
  }

  // The log

  _fold() {
    const { events, count, records } = this;
    const start = new Int32Array(events + 1);
    const fields = [],
      blocks = [],
      values = [];
    const state = new State(count);
    const apart = Math.max(LEAST_APART, Math.ceil(events / MOST_KEYFRAMES));
    const stamp = new Int32Array(count).fill(-1); // the transition a block is active since
    let transition = -1,
      active = 0,
      full = 0,
      born = 0;
    this.keyframes = [];
    this.apart = apart;
    this.deviceAt = new Int32Array(events);
    this.poolAt = new Int32Array(events); // of all problems that share the budget
    this.hostAt = new Int32Array(events);
    this.compressedAt = new Int32Array(events);
    this.activeAt = new Int32Array(events);
    this.fullAt = new Int32Array(events);
    this.closedAt = new Int32Array(events);
    this.transitionAt = new Int32Array(events);
    this.backtracks = [];
    this.shares = isCount(this.plan.pool_tokens); // its budget with other problems

    const put = (field, block, value) => {
      if (field === DEVICE && stamp[block] === transition) active += value - state.device[block];
      state.set(field, block, value);
      fields.push(field);
      blocks.push(block);
      values.push(value);
    };
    const activate = (block) => {
      for (let at = block; at >= 0 && stamp[at] !== transition; at = this.parent[at]) {
        stamp[at] = transition;
        active += state.device[at];
      }
    };
    // tokens that came back minus tokens that left, of blocks whose length is not known yet
    const moved = new Int32Array(count);
    const move = (rows, field, sign) => {
      for (const [id, tokens] of pairs(rows)) {
        const block = this.blockOf(id);
        if (block < 0) continue;
        if (field === DEVICE && state.state[block] === OPEN) moved[block] += sign * tokens;
        else if (field === DEVICE) put(field, block, state.device[block] + sign * tokens);
        else put(field, block, Math.max(0, state.host[block] + sign * tokens));
      }
    };

    let device = 0,
      pool = 0,
      host = 0,
      compressed = 0,
      closed = 0;
    // the prompt, until all of it is computed, piece by piece where it is longer than a lossy budget
    let prompt = -1,
      uncomputed = 0;
    for (let event = 0; event < events; event++) {
      const record = records[event];
      if (prompt >= 0 && record.e in NAMED && !BETWEEN_PIECES.has(record.e)) {
        const prefill = record.e === "forward" && record.kind === "prefill" && isCount(record.rows);
        const shared = record.e === "share" && sum(pairs(record.nodes));
        const some = prefill ? record.rows : shared;
        const piece = some === false ? uncomputed : Math.min(some, uncomputed);
        put(DEVICE, prompt, state.device[prompt] + piece);
        uncomputed -= piece;
        if (!uncomputed) prompt = -1;
      } else if (record.e === "share") {
        move(record.nodes, DEVICE, +1);
      }
      switch (record.e) {
        case "node": {
          if (born >= count || this.opened[born] !== event) break;
          const block = born++;
          activate(block);
          const root = record.parent === null || record.parent === undefined;
          put(STATE, block, root ? CLOSED : OPEN);
          if (root && isCount(record.tokens)) {
            put(TOKENS, block, record.tokens);
            prompt = block;
            uncomputed = record.tokens;
            full += record.tokens;
          }
          break;
        }
        case "boundary": {
          const block = this.blockOf(record.node);
          if (block < 0 || this.opened[block] > event) break;
          if (this.closed[block] < 0) closed++;
          this.closed[block] = event;
          const tokens = isCount(record.tokens) ? record.tokens : 0;
          full += tokens - state.tokens[block];
          put(TOKENS, block, tokens);
          put(DEVICE, block, tokens + moved[block]);
          moved[block] = 0;
          put(STATE, block, CLOSED);
          break;
        }
        case "transition": {
          const before = new Set(list(record.previous));
          transition = event;
          active = 0;
          let back = false;
          for (const id of list(record.leaves)) {
            const block = this.blockOf(id);
            if (block < 0) continue;
            activate(block);
            back ||= before.size > 0 && !this.path(block).some((at) => before.has(this.id[at]));
          }
          if (back) this.backtracks.push(event);
          break;
        }
        case "evict":
          move(record.nodes, DEVICE, -1);
          move(list(record.stored), HOST, +1);
          break;
        case "discard":
          move(list(record.taken), HOST, +1);
          move(record.nodes, HOST, -1);
          break;
        case "rehydrate":
          move(record.nodes, DEVICE, +1);
          if (record.mode === "fetch") move(record.nodes, HOST, -1);
          break;
        case "verify":
          list(record.nodes).forEach((id, place) => {
            const block = this.blockOf(id);
            if (block >= 0 && place < list(record.values).length)
              put(VALUE, block, number(record.values[place]));
          });
          break;
        case "prune":
          for (const id of list(record.nodes)) {
            if (this.index.has(id)) put(STATE, this.blockOf(id), PRUNED);
          }
          break;
        case "terminal":
          if (this.index.has(record.node)) put(STATE, this.blockOf(record.node), TERMINAL);
          break;
      }
      const kv = record.kv;
      if (record.e !== "header" && kv && isCount(kv.device)) {
        device = kv.device;
        pool = isCount(kv.pool) ? Math.max(kv.pool, device) : device;
        this.shares ||= pool > device;
        host = (isCount(kv.host) ? kv.host : 0) + (isCount(kv.disk) ? kv.disk : 0);
        compressed = isCount(kv.compressed) ? kv.compressed : 0;
      }
      start[event + 1] = fields.length;
      this.deviceAt[event] = device;
      this.poolAt[event] = pool;
      this.hostAt[event] = host;
      this.compressedAt[event] = compressed;
      this.activeAt[event] = Math.max(0, Math.min(active, device));
      this.fullAt[event] = full;
      this.closedAt[event] = closed;
      this.transitionAt[event] = transition;
      if (event % apart === 0) {
        const frame = new State(count);
        state.event = event;
        frame.copy(state);
        this.keyframes.push(frame);
      }
    }
    this.log = {
      start,
      field: Uint8Array.from(fields),
      block: Int32Array.from(blocks),
      value: Float64Array.from(values),
    };
    this.length = state.tokens; // of every block in the end
    this.lastValue = state.value;
    this.lastState = state.state;
  }

  /** Brings a state to an event, forwards from where it is or from the keyframe before. */
  seek(state, event) {
    if (event !== state.event) {
      const frame = this.keyframes[Math.floor(event / this.apart)];
      if (state.event > event || state.event < frame.event) state.copy(frame);
      const { start, field, block, value } = this.log;
      const stop = start[event + 1];
      for (let entry = start[state.event + 1]; entry < stop; entry++) {
        state.set(field[entry], block[entry], value[entry]);
      }
      state.event = event;
    }
    this._activate(state);
    return state;
  }

  /** Marks the paths that run at a state's event: those of its leaves, and what was opened since. */
  _activate(state) {
    state.active.fill(0);
    const mark = (block) => {
      for (let at = block; at >= 0 && !state.active[at]; at = this.parent[at]) state.active[at] = 1;
    };
    for (const id of this.running(state.event)) mark(this.blockOf(id));
    const since = this.transitionAt[state.event];
    for (let block = before(this.opened, since + 1); block < this.count; block++) {
      if (this.opened[block] > state.event) break;
      mark(block);
    }
  }

  /** Ids of the leaves that grow at an event, from the trace. */
  running(event) {
    const transition = this.transitionAt[event];
    return transition < 0 ? [] : list(this.records[transition].leaves).filter((id) => this.index.has(id));
  }

  // Layout: x counts tokens from the prompt's first, y counts leaves

  _layout() {
    const { count, parent, children, length } = this;
    this.start = new Int32Array(count);
    this.row = new Float64Array(count);
    this.top = new Float64Array(count); // rows of the subtree, [top, bottom)
    this.bottom = new Float64Array(count);
    this.leaf = new Uint8Array(count);
    this.rows = 0;
    this.width = 1;
    this.levels = 0;
    const stack = [];
    for (let root = count - 1; root >= 0; root--) if (parent[root] < 0) stack.push(root);
    const order = [];
    while (stack.length) {
      const block = stack.pop();
      order.push(block);
      const from = parent[block];
      this.start[block] = from < 0 ? 0 : this.start[from] + length[from];
      this.width = Math.max(this.width, this.start[block] + length[block]);
      this.levels = Math.max(this.levels, this.depth[block]);
      this.top[block] = this.rows;
      if (children[block].length === 0) {
        this.leaf[block] = 1;
        this.row[block] = this.rows++;
      }
      for (let i = children[block].length - 1; i >= 0; i--) stack.push(children[block][i]);
    }
    for (let i = order.length - 1; i >= 0; i--) {
      const block = order[i],
        below = children[block];
      if (below.length) {
        this.row[block] = (this.row[below[0]] + this.row[below[below.length - 1]]) / 2;
        this.bottom[block] = this.bottom[below[below.length - 1]];
      } else {
        this.bottom[block] = this.top[block] + 1;
      }
    }
    this.order = order; // depth first: as the table lists them
  }

  // Axes of the timeline: a number that never falls, for every event

  _axes() {
    const { events, records } = this;
    const time = new Float64Array(events);
    let now = 0;
    for (let event = 0; event < events; event++) {
      const t = records[event].t;
      if (typeof t === "number" && t > now) now = t;
      time[event] = now;
    }
    this.axes = {
      event: Float64Array.from({ length: events }, (_, event) => event),
      time,
      blocks: Float64Array.from(this.closedAt),
    };
  }

  /** The last event at or before a place on an axis. */
  eventAt(axis, place) {
    return Math.max(0, before(this.axes[axis], place + 1e-9) - 1);
  }

  /** The event at the place of another run's, as many events after that place was reached. */
  eventLike(axis, run, event) {
    const place = run.axes[axis][event];
    const last = this.eventAt(axis, place);
    const since = event - before(run.axes[axis], place);
    return Math.min(last, before(this.axes[axis], this.axes[axis][last]) + since);
  }

  // What is worked out when it is first asked for

  /** For every block the events that name it, as offsets into one list. */
  get mentions() {
    if (!this._mentions) {
      const starts = new Int32Array(this.count + 1);
      const blocks = [],
        events = [];
      this.records.forEach((record, event) => {
        for (const id of named(record)) {
          const block = this.blockOf(id);
          if (block < 0) continue;
          starts[block + 1]++;
          blocks.push(block);
          events.push(event);
        }
      });
      for (let block = 0; block < this.count; block++) starts[block + 1] += starts[block];
      const fill = starts.slice(),
        at = new Int32Array(events.length);
      events.forEach((event, i) => {
        at[fill[blocks[i]]++] = event;
      });
      this._mentions = { starts, at };
    }
    return this._mentions;
  }

  mentionsOf(block) {
    const { starts, at } = this.mentions;
    return at.subarray(starts[block], starts[block + 1]);
  }

  /** Tokens that were evicted and returned: block, eviction and need. */
  get regrets() {
    if (!this._regrets) {
      const lost = new Map();
      this._regrets = [];
      this.evictedTokens = 0;
      this.records.forEach((record, event) => {
        if (record.e === "evict") {
          for (const [id, tokens] of pairs(record.nodes)) {
            lost.set(id, { event, tokens, cause: String(record.cause || "") });
            this.evictedTokens += tokens;
          }
        } else if (record.e === "rehydrate") {
          for (const [id, tokens] of pairs(record.nodes)) {
            const from = lost.get(id);
            if (!from) continue;
            this._regrets.push({
              id,
              tokens,
              lost: from.event,
              needed: event,
              cause: from.cause,
              mode: String(record.mode || ""),
              gap: event - from.event,
            });
          }
        }
      });
    }
    return this._regrets;
  }

  /** How many tokens of a block were on the device, as [event, tokens] steps. */
  residency(block) {
    const { start, field, block: blocks, value } = this.log;
    const steps = [];
    let event = this.opened[block];
    for (let entry = start[event]; entry < field.length; entry++) {
      if (blocks[entry] !== block || field[entry] !== DEVICE) continue;
      while (start[event + 1] <= entry) event++;
      steps.push([event, value[entry]]);
    }
    return steps;
  }
}

/** How many entries of a sorted array are below a value. */
function before(sorted, value) {
  let low = 0,
    high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Ids of the blocks that an event is about, whatever its type. */
function named(record) {
  const fields = NAMED[record.e] || GENERIC;
  const found = fields.includes("node") && isCount(record.node) ? [record.node] : [];
  for (const field of fields) {
    for (const item of list(record[field])) {
      if (isCount(item)) found.push(item);
      else if (Array.isArray(item) && isCount(item[0])) found.push(item[0]);
      else if (item && isCount(item.node)) found.push(item.node);
    }
  }
  return found.length > 1 ? [...new Set(found)] : found;
}

// where events name blocks; those of other types may anywhere
const NAMED = {
  __proto__: null,
  header: [],
  node: ["node"],
  boundary: ["node"],
  stop: ["branches"],
  terminal: ["node"],
  select: ["leaves"],
  transition: ["leaves"],
  pressure: [],
  forward: [],
  sample: ["nodes"],
  evict: ["nodes"],
  discard: ["nodes", "taken"],
  rehydrate: ["nodes"],
  share: ["nodes"],
  merge: ["nodes"],
  score: [],
  compare: [],
  audit: [],
  verify: ["nodes"],
  prune: ["nodes"],
  allocate: ["nodes"],
  answer: ["node", "path"],
  end: [],
};
const GENERIC = [
  "node",
  "nodes",
  "leaves",
  "path",
  "keep",
  "kept",
  "counts",
  "blocks",
  "candidates",
  "src",
  "dst",
];
