// panels.js: what stands beside the tree. A panel is built once; `show(scene)` brings it to the scene's event and block.

const EVENT_TALL = 25; // CSS pixels of one row of the event list
const PAGE = 200; // rows of the table on one page

const link = (id, go, label = `#${id}`) =>
  make("button", { type: "button", class: "chip", on: { click: () => go(id) } }, label);

const fact = (name, ...value) => [make("dt", {}, name), make("dd", {}, ...value)];

/** A block of a panel under a heading. */
const part = (title, ...inside) => make("section", { class: "part" }, make("h3", {}, title), ...inside);

const meter = (share, kind = "") =>
  make("span", { class: `meter ${kind}`, "aria-hidden": "true" }, make("i", { style: { width: `${100 * Math.max(0, Math.min(1, share || 0))}%` } }));

// The inspector

class BlockPanel {
  constructor(view) {
    this.view = view;
    this.name = "Block";
    this.body = make("div", { class: "panel" });
  }

  show(scene) {
    const { run, state, selected } = scene;
    const scroll = this.body.scrollTop;
    this.spark = null;
    this.body.replaceChildren(...(selected < 0 ? [make("p", { class: "hint" }, "Select a block in the tree, or press a for the answer.")] : this._block(scene, run, state, selected)));
    this.body.scrollTop = scroll;
    if (this.spark) this.spark(); // it has its size only now
  }

  _block(scene, run, state, block) {
    const id = run.id[block], born = state.state[block] !== UNBORN;
    const kind = run.parent[block] < 0 ? "prompt" : `thought ${run.depth[block]}`;
    const states = [STATES[state.state[block]] === "unborn" ? "not opened yet" : STATES[state.state[block]]];
    if (state.active[block]) states.push("running");
    if (run.answerPath[block]) states.push("on the answer's path");
    return [
      make("h2", {}, `#${id} `, make("small", {}, kind), ...states.map((each) => make("span", { class: `state ${each}` }, each))),
      this._text(run, block),
      born ? this._kept(run, state, block) : null,
      this._scores(run, state, block),
      this._verified(scene, run, block),
      this._policy(scene, run, block),
      this._family(run, state, block),
      this._history(scene, run, block),
    ].filter(Boolean);
  }

  _text(run, block) {
    const text = run.text(block);
    const answer = run.answers.get(block);
    return make("div", {},
      make("pre", { class: "text", tabindex: 0, "aria-label": "Text of the block" }, text || (run.closing(block) || run.parent[block] < 0 ? "(no text in this trace)" : "(never closed)")),
      answer ? make("p", { class: "answers" }, "answers ", make("b", {}, answer)) : null);
  }

  _kept(run, state, block) {
    const tokens = state.tokens[block], device = state.device[block], host = state.host[block];
    const gone = Math.max(0, tokens - device - host);
    const row = (name, value, kind) => make("div", { class: "kept" },
      make("span", {}, name), meter(tokens ? value / tokens : 0, kind), make("span", { class: "number" }, `${count(value)}/${count(tokens)}`));
    return part("KV",
      state.state[block] === OPEN ? make("p", { class: "hint" }, "decoding: its tokens are counted when it closes") : null,
      row("device", device, state.active[block] ? "active" : "idle"),
      host || this.view.hosted ? row("host", host, "host") : null,
      row("gone", gone, "gone"),
      this._spark(run, block));
  }

  /** Tokens on the device over the run, small. */
  _spark(run, block) {
    const steps = run.residency(block);
    if (steps.length < 2) return null;
    const canvas = make("canvas", { class: "spark", role: "img", "aria-label": `Tokens on the device over the run: ${steps.slice(-12).map(([event, tokens]) => `${tokens} at event ${event}`).join(", ")}` });
    this.spark = () => {
      const { pen, width, height } = sharp(canvas), { colours } = this.view;
      const most = Math.max(1, run.length[block]), axis = run.axes[this.view.axis], end = axis[run.events - 1] || 1;
      pen.fillStyle = colours.idle;
      steps.forEach(([event, tokens], i) => {
        const from = (axis[event] / end) * width, to = i + 1 < steps.length ? (axis[steps[i + 1][0]] / end) * width : width;
        const tall = (height - 1) * (tokens / most);
        pen.fillRect(from, height - 1 - tall, Math.max(1, to - from), tall);
      });
      pen.fillStyle = colours.ink;
      pen.fillRect(0, height - 1, width, 1);
      pen.fillRect((axis[this.view.current.event] / end) * width, 0, 1, height);
    };
    return make("div", {}, canvas, make("p", { class: "hint small" }, "on the device, over the run"));
  }

  _scores(run, state, block) {
    const closing = run.closing(block);
    if (!closing && run.parent[block] < 0) return null;
    const record = closing || {}, tokens = run.length[block];
    const shared = (name, value, title) => Number.isFinite(value)
      ? make("div", { class: "kept", title }, make("span", {}, name), meter(value), make("span", { class: "number" }, fixed(value, 3))) : null;
    const logprob = number(record.logprob);
    return part("Scores",
      shared("value", state.value[block], "the verifier's opinion, 0 to 1"),
      shared("confidence", number(record.confidence), "1 - entropy / ln vocabulary, mean"),
      shared("top-1", number(record.top1), "mean probability of the likeliest token"),
      make("dl", {},
        ...(Number.isFinite(logprob) ? fact("log prob.", `${fixed(logprob, 3)}${tokens ? ` (${fixed(logprob / tokens, 3)} a token)` : ""}`) : []),
        ...(record.stop ? fact("stopped by", String(record.stop)) : []),
        ...fact("tokens", `${count(tokens)}, from ${count(run.start[block])} to ${count(run.start[block] + tokens)}`)));
  }

  _verified(scene, run, block) {
    const event = last(run.mentionsOf(block), (at) => run.records[at].e === "verify" && at <= scene.event);
    if (event < 0) return null;
    const record = run.records[event], id = run.id[block];
    const asked = isCount(record.asked) ? `asked about ${record.asked} of ${list(record.nodes).length}` : "";
    const rest = factsAbout(record, id).filter(([key]) => !["verifier", "values", "asked", "elapsed_s", "entropy", "layers", "exit_layer"].includes(key));
    return part("Verification",
      make("dl", {},
        ...fact("by", `${record.verifier ?? "?"}${asked ? `, ${asked}` : ""}`),
        ...rest.flatMap(([key, value]) => fact(key.replaceAll("_", " "), value))),
      this._exits(record, id));
  }

  /** One cell a layer: how sure the model was there, and where it stopped. */
  _exits(record, id) {
    const place = list(record.nodes).indexOf(id);
    const own = (value) => (Array.isArray(value) && Array.isArray(value[place]) ? value[place] : value);
    let exit = Array.isArray(record.exit_layer) ? record.exit_layer[place] : record.exit_layer;
    const entropy = list(own(record.entropy)).map(number);
    const layers = isCount(record.layers) ? record.layers : Math.max(entropy.length, isCount(exit) ? exit + 1 : 0);
    if (!layers || layers > 512 || (!entropy.length && !isCount(exit))) return null;
    if (!isCount(exit)) exit = layers;
    const most = Math.max(1e-9, ...entropy.filter(Number.isFinite));
    return make("div", { class: "exits", role: "img", "aria-label": `left at layer ${exit} of ${layers}` },
      ...Array.from({ length: layers }, (_, layer) => make("i", {
        class: layer === exit ? "exit" : layer > exit ? "skipped" : "",
        title: `layer ${layer}${Number.isFinite(entropy[layer]) ? `, entropy ${fixed(entropy[layer])}` : ""}`,
        style: { "--tall": Number.isFinite(entropy[layer]) ? entropy[layer] / most : layer > exit ? 0.12 : 1 },
      })),
      make("span", {}, `layer ${exit} of ${layers}`));
  }

  /** What events of types that this page does not know say of the block: a retention policy's counts and reasons. */
  _policy(scene, run, block) {
    const event = last(run.mentionsOf(block), (at) => (run.records[at].e === "allocate" || !(run.records[at].e in SENTENCES)) && at <= scene.event);
    if (event < 0) return null;
    const record = run.records[event], own = list(record.nodes).find((row) => Array.isArray(row) && row[0] === run.id[block]);
    if (record.e === "allocate" && own) {
      return part("Retention",
        make("p", { class: "hint" }, `${record.policy}, `, link(event, () => this.view.seek(event), `event ${event}`)),
        make("dl", {}, ...fact("kept", `${count(own[2])} of ${count(own[1])} tokens`), ...fact("score", fixed(own[3], 3)), ...fact("room", `${count(record.room)} for ${plural(record.offered, "block")}`)));
    }
    return part(record.e,
      make("p", { class: "hint" }, "at ", link(event, () => this.view.seek(event), `event ${event}`)),
      make("dl", {}, ...factsAbout(record, run.id[block]).flatMap(([key, value]) => fact(key.replaceAll("_", " "), value))));
  }

  _family(run, state, block) {
    const go = (each) => () => this.view.select(each);
    const path = run.path(block).slice(0, -1), below = run.children[block];
    return part("Family",
      make("dl", {},
        ...(path.length ? fact("above", ...path.map((each) => link(run.id[each], go(each)))) : []),
        ...fact("below", ...(below.length ? below.slice(0, 24).map((each) => make("button", {
          type: "button", class: `chip ${STATES[state.state[each]]}`, title: line(run.text(each)), on: { click: go(each) },
        }, `#${run.id[each]}${Number.isFinite(state.value[each]) ? ` ${fixed(state.value[each])}` : ""}`)) : ["nothing"]),
        below.length > 24 ? ` and ${count(below.length - 24)} more` : "")));
  }

  _history(scene, run, block) {
    const all = run.mentionsOf(block);
    const from = Math.max(0, Math.min(all.length - 14, before(all, scene.event + 1) - 8));
    return part(`History, ${plural(all.length, "event")}`,
      make("ol", { class: "history" }, ...[...all.subarray(from, from + 14)].map((event) => make("li", {},
        make("button", { type: "button", class: event === scene.event ? "row now" : event > scene.event ? "row later" : "row", on: { click: () => this.view.seek(event) } },
          make("span", { class: "number" }, count(event)), make("b", { class: `type ${kindOf(run.records[event])}` }, run.records[event].e), make("span", { class: "says" }, this._own(run.records[event], run.id[block])))))));
  }

  /** An event from the side of one block. */
  _own(record, id) {
    const row = pairs(record.nodes).find((each) => each[0] === id);
    if (record.e === "evict" && row) return `loses ${plural(row[1], "token")} (${record.cause})`;
    if (record.e === "rehydrate" && row) return `regains ${plural(row[1], "token")} (${record.mode})`;
    if (record.e === "verify") return `value ${fixed(list(record.values)[list(record.nodes).indexOf(id)], 3)}`;
    if (record.e === "boundary") return `closes, ${plural(record.tokens, "token")}`;
    if (record.e === "allocate") {
      const own = list(record.nodes).find((each) => Array.isArray(each) && each[0] === id);
      if (own) return `keeps ${count(own[2])} of ${count(own[1])}, score ${fixed(own[3])}`;
    }
    return record.e in SENTENCES ? sentence(record) : factsAbout(record, id).map(([key, value]) => `${key}=${value}`).join("  ");
  }
}

/** The last entry of a sorted list of events that passes a test, or -1. */
function last(events, test) {
  for (let i = events.length - 1; i >= 0; i--) if (test(events[i])) return events[i];
  return -1;
}

const kindOf = (record) => (record.e in SENTENCES ? record.e : "other");

// The event list

class EventPanel {
  constructor(view) {
    this.view = view;
    this.name = "Events";
    this.hidden = new Set();
    this.chips = make("div", { class: "chips", role: "group", "aria-label": "Types of events" });
    this.words = make("input", { type: "search", placeholder: "words in events", "aria-label": "Words in events", autocomplete: "off", spellcheck: "false", on: { input: () => this._refresh() } });
    this.space = make("div", { class: "space" });
    this.scroller = make("div", { class: "scroller", tabindex: 0, role: "group", "aria-label": "Events", on: { scroll: () => this._rows() } }, this.space);
    this.none = make("p", { class: "hint" });
    this.body = make("div", { class: "panel events" }, this.chips, this.words, this.none, this.scroller);
  }

  show(scene) {
    if (this.run !== scene.run) {
      this.run = scene.run;
      this._chips();
      this._filter();
    }
    if (this.event !== scene.event || !this.shown) {
      this.event = scene.event;
      this._follow();
    }
    this._rows();
  }

  _chips() {
    const counts = new Map();
    for (const record of this.run.records) counts.set(record.e, (counts.get(record.e) || 0) + 1);
    this.chips.replaceChildren(...[...counts].map(([type, many]) => make("button", {
      type: "button", class: `filter ${type in SENTENCES ? type : "other"}`, "aria-pressed": String(!this.hidden.has(type)),
      title: "Click to hide or show; double-click for only this type",
      on: {
        click: (event) => { this._toggle(type); event.currentTarget.setAttribute("aria-pressed", String(!this.hidden.has(type))); },
        dblclick: () => this._only(type, [...counts.keys()]),
      },
    }, type, make("small", {}, count(many)))));
  }

  _toggle(type) {
    if (!this.hidden.delete(type)) this.hidden.add(type);
    this._refresh();
  }

  _only(type, types) {
    const alone = this.hidden.size === types.length - 1 && !this.hidden.has(type);
    this.hidden = new Set(alone ? [] : types.filter((each) => each !== type));
    this._chips();
    this._refresh();
  }

  _refresh() {
    this._filter();
    this._follow();
    this._rows();
  }

  _filter() {
    const words = this.words.value.trim().toLowerCase();
    const shown = [];
    this.run.records.forEach((record, event) => {
      if (this.hidden.has(record.e)) return;
      if (words && !`${record.e} ${sentence(record)}`.toLowerCase().includes(words)) return;
      shown.push(event);
    });
    this.shown = Int32Array.from(shown);
    this.space.style.height = `${this.shown.length * EVENT_TALL}px`;
    this.none.textContent = this.shown.length === this.run.events ? "" : `${count(this.shown.length)} of ${plural(this.run.events, "event")}`;
  }

  /** Keeps the current event in the frame. */
  _follow() {
    const at = Math.max(0, before(this.shown, this.event + 1) - 1) * EVENT_TALL, { scroller } = this;
    if (at < scroller.scrollTop + EVENT_TALL || at > scroller.scrollTop + scroller.clientHeight - 2 * EVENT_TALL) {
      scroller.scrollTop = Math.max(0, at - scroller.clientHeight / 2);
    }
  }

  _rows() {
    if (!this.run) return;
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / EVENT_TALL) - 4);
    const end = Math.min(this.shown.length, first + Math.ceil((this.scroller.clientHeight || 400) / EVENT_TALL) + 8);
    const rows = [];
    for (let i = first; i < end; i++) {
      const event = this.shown[i], record = this.run.records[event];
      rows.push(make("button", {
        type: "button", class: event === this.event ? "row now" : event > this.event ? "row later" : "row",
        "aria-current": event === this.event ? "true" : undefined, style: { top: `${i * EVENT_TALL}px` },
        title: sentence(record), on: { click: () => this.view.seek(event) },
      },
      make("span", { class: "number" }, count(event)), make("b", { class: `type ${kindOf(record)}` }, record.e), make("span", { class: "says" }, sentence(record))));
    }
    this.space.replaceChildren(...rows);
  }
}

// Rehydration regret

class RegretPanel {
  constructor(view) {
    this.view = view;
    this.name = "Regret";
    this.within = make("input", { type: "number", min: 1, value: 100, "aria-label": "Events between eviction and need", on: { input: () => this._fill() } });
    this.summary = make("p", { class: "regret-sum" });
    this.rows = make("tbody");
    this.body = make("div", { class: "panel" },
      make("p", { class: "hint" }, "KV that left the device and had to be made again: what a better policy would have kept."),
      make("label", { class: "within" }, "needed again within ", this.within, " events"),
      this.summary,
      make("table", {}, make("thead", {}, make("tr", {}, ...["block", "tokens", "lost", "needed", "gap", "cause"].map((name) => make("th", { scope: "col" }, name)))), this.rows));
  }

  show(scene) {
    if (this.run === scene.run) return;
    this.run = scene.run;
    this._fill();
  }

  _fill() {
    const within = Number(this.within.value) || Infinity, { run } = this;
    const rows = run.regrets.filter((regret) => regret.gap <= within).sort((a, b) => a.gap - b.gap || b.tokens - a.tokens);
    const tokens = rows.reduce((total, regret) => total + regret.tokens, 0);
    const share = run.evictedTokens ? (100 * tokens) / run.evictedTokens : 0;
    this.summary.textContent = run.evictedTokens
      ? `${plural(tokens, "token")} came back within ${Number.isFinite(within) ? plural(within, "event") : "any time"}: ${share.toFixed(share > 0 && share < 10 ? 1 : 0)} % of the ${count(run.evictedTokens)} that were evicted.`
      : "Nothing was evicted in this run.";
    const seek = (event) => link(event, () => this.view.seek(event), count(event));
    this.rows.replaceChildren(...rows.slice(0, PAGE).map((regret) => make("tr", {},
      make("td", {}, link(regret.id, () => this.view.select(run.blockOf(regret.id)))),
      make("td", { class: "number" }, count(regret.tokens)),
      make("td", {}, seek(regret.lost)), make("td", {}, seek(regret.needed)),
      make("td", { class: "number" }, count(regret.gap)), make("td", {}, regret.cause))));
  }
}

// Candidates

class AnswerPanel {
  constructor(view) {
    this.view = view;
    this.name = "Answers";
    this.body = make("div", { class: "panel" });
  }

  show(scene) {
    const { run, state } = scene;
    if (this.run === run && this.event === scene.event) return;
    this.run = run;
    this.event = scene.event;
    const ended = [...run.ofType("terminal")].filter((event) => event <= scene.event)
      .map((event) => ({ event, block: run.blockOf(run.records[event].node), answer: run.records[event].answer }))
      .filter(({ block }) => block >= 0)
      .sort((a, b) => (state.value[b.block] || 0) - (state.value[a.block] || 0) || a.event - b.event);
    const logprob = (block) => run.path(block).reduce((total, each) => total + (number((run.closing(each) || {}).logprob) || 0), 0);
    this.body.replaceChildren(
      run.answer && scene.event >= run.answeredAt ? make("p", { class: "big" }, run.answer.text ?? "no answer", make("small", {}, ` score ${fixed(run.answer.score, 3)}${run.answer.correct === true ? ", correct" : run.answer.correct === false ? ", wrong" : ""}`)) : make("p", { class: "hint" }, "No answer has been chosen at this event."),
      make("p", { class: "hint" }, `${plural(ended.length, "path")} ended so far.`),
      make("table", {}, make("thead", {}, make("tr", {}, ...["block", "value", "log prob.", "answer"].map((name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, ...ended.slice(0, PAGE).map(({ block, answer }) => make("tr", { class: run.answer && run.answer.node === run.id[block] && scene.event >= run.answeredAt ? "chosen" : "" },
          make("td", {}, link(run.id[block], () => this.view.select(block))),
          make("td", { class: "number" }, fixed(state.value[block], 3)),
          make("td", { class: "number" }, fixed(logprob(block))),
          make("td", { class: "wraps" }, answer ?? "–"))))));
  }
}

// The tree as a table, for who does not see canvases

class TablePanel {
  constructor(view) {
    this.view = view;
    this.name = "Table";
    this.page = 0;
    this.caption = make("caption");
    this.rows = make("tbody");
    this.turn = make("p", { class: "turn" });
    this.body = make("div", { class: "panel" }, make("table", { class: "tree" }, this.caption,
      make("thead", {}, make("tr", {}, ...["block", "state", "kept", "value", "text"].map((name) => make("th", { scope: "col" }, name)))), this.rows), this.turn);
  }

  show(scene) {
    const { run, state } = scene;
    if (this.run !== run) this.page = 0;
    this.run = run;
    const moved = scene.selected !== this.selected;
    if (moved) {
      this.selected = scene.selected;
      if (scene.selected >= 0) this.page = Math.floor(run.order.indexOf(scene.selected) / PAGE);
    }
    const pages = Math.max(1, Math.ceil(run.count / PAGE));
    this.caption.textContent = `${plural(run.count, "block")} at event ${count(scene.event)}, depth first`;
    this.rows.replaceChildren(...run.order.slice(this.page * PAGE, (this.page + 1) * PAGE).map((block) => {
      const born = state.state[block] !== UNBORN;
      return make("tr", { class: `${block === scene.selected ? "now" : ""} ${born ? "" : "later"}` },
        make("th", { scope: "row", style: { "--depth": Math.min(12, run.depth[block]) } }, link(run.id[block], () => this.view.select(block))),
        make("td", {}, born ? STATES[state.state[block]] : "–"),
        make("td", { class: "number" }, `${count(state.device[block] + state.host[block])}/${count(state.tokens[block])}`),
        make("td", { class: "number" }, fixed(state.value[block])),
        make("td", { class: "says" }, line(run.text(block)).slice(0, 80)));
    }));
    const row = moved && this.rows.querySelector(".now");
    if (row) this.body.scrollTop = row.offsetTop - this.body.clientHeight / 2;
    const turn = (to, label) => make("button", { type: "button", disabled: to < 0 || to >= pages, on: { click: () => { this.page = to; this.show(this.view.scene()); } } }, label);
    this.turn.replaceChildren(...(pages > 1 ? [turn(this.page - 1, "‹ before"), ` page ${this.page + 1} of ${pages} `, turn(this.page + 1, "after ›")] : []));
  }
}

// The run: metrics and configuration

const METRICS = [
  ["wall_s", "time", seconds], ["decode_s", "decoding", seconds], ["verify_s", "verifying", seconds],
  ["rehydrate_s", "rehydrating", seconds], ["policy_s", "retention policy", seconds], ["blocks", "blocks", count], ["tokens_generated", "tokens generated", count],
  ["tok_per_s", "tokens a second", (value) => fixed(value, 0)], ["budget_tokens", "budget, tokens", count],
  ["peak_tokens", "peak on the device", count], ["tree_tokens", "tokens of the tree", count],
  ["evicted_tokens", "tokens evicted", count], ["rehydrations", "rehydrations", count],
  ["tokens_recomputed", "tokens recomputed", count], ["tokens_fetched", "tokens fetched", count],
  ["pressure_events", "pressure", count], ["transitions", "transitions", count], ["asked", "thoughts asked about", count],
  ["reads_saved", "reads that sharing saved", (value) => `${fixed(100 * value, 0)} %`],
];

class RunPanel {
  constructor(view) {
    this.view = view;
    this.name = "Run";
    this.body = make("div", { class: "panel" });
  }

  show(scene) {
    const { run } = scene;
    if (this.run === run) return;
    this.run = run;
    const { header } = run, metrics = (run.end && run.end.metrics) || {};
    const config = JSON.stringify(header.config || {}, null, 2);
    const about = [["trace", run.name], ["run", header.run], ["created", header.created], ["arbor", header.arbor], ["task", header.task], ["seed", header.seed], ["expected", header.expected], ["model", (header.model || {}).id], ["device", (header.device || {}).name], ["KV of a token", isCount(run.plan.bytes_per_token) ? bytes(run.plan.bytes_per_token) : null]];
    this.body.replaceChildren(
      part("Metrics", Object.keys(metrics).length
        ? make("dl", { class: "wide" }, ...METRICS.filter(([key]) => key in metrics).flatMap(([key, label, form]) => fact(label, form(metrics[key]))))
        : make("p", { class: "hint" }, "The run did not come to its end.")),
      part("About", make("dl", { class: "wide" }, ...about.filter(([, value]) => value !== undefined && value !== null).flatMap(([name, value]) => fact(name, String(value))))),
      part("Configuration", copyButton(config), make("pre", { class: "text config", tabindex: 0, "aria-label": "Configuration" }, config)));
  }
}

function copyButton(text) {
  const button = make("button", { type: "button", class: "copy" }, "copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch (blocked) {
      getSelection().selectAllChildren(button.nextElementSibling); // a file or a frame may not write: select it instead
      button.textContent = "selected";
    }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  return button;
}

// Two runs

class ComparePanel {
  constructor(view) {
    this.view = view;
    this.name = "A / B";
    this.body = make("div", { class: "panel" });
  }

  show() {
    if (this.done) return;
    this.done = true;
    const [a, b] = this.view.panes.map((pane) => pane.run);
    const metrics = [a, b].map((run) => (run.end && run.end.metrics) || {});
    const apart = parting(a, b);
    this.body.replaceChildren(
      part("Where they part", make("p", {}, apart.text, ...apart.seek.map((event, i) => event < 0 ? null : [" ", link(event, () => this.view.seek(event, i), `${"AB"[i]} event ${count(event)}`)]).flat())),
      part("Metrics", make("table", {}, make("thead", {}, make("tr", {}, ...["", "A", "B", "B / A"].map((name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, ...METRICS.filter(([key]) => key in metrics[0] && key in metrics[1]).map(([key, label, form]) => make("tr", {},
          make("th", { scope: "row" }, label), ...metrics.map((of) => make("td", { class: "number" }, form(of[key]))),
          make("td", { class: "number" }, metrics[0][key] ? `${fixed(metrics[1][key] / metrics[0][key])}×` : "–")))))),
      part("Settings that differ", make("table", {}, make("tbody", {}, ...differences(a.header.config || {}, b.header.config || {}).map(([key, left, right]) => make("tr", {},
        make("th", { scope: "row" }, key), make("td", { class: "wraps" }, brief(left)), make("td", { class: "wraps" }, brief(right))))))));
  }
}

/** The first block that differs, in the order blocks were opened. */
function parting(a, b) {
  const both = Math.min(a.count, b.count);
  for (let block = 0; block < both; block++) {
    if (a.text(block) !== b.text(block) || a.parent[block] !== b.parent[block] || a.length[block] !== b.length[block]) {
      return { text: `The trees differ from block #${a.id[block]} on.`, seek: [a.closed[block], b.closed[block]] };
    }
  }
  if (a.count !== b.count) return { text: `The first ${plural(both, "block")} are equal; then one tree goes on.`, seek: [] };
  return { text: `The trees are equal: ${plural(both, "block")}, the same texts. Only where their KV was differs.`, seek: [] };
}

/** Settings that differ, as [dotted key, of A, of B]. */
function differences(a, b, prefix = "") {
  const found = [];
  for (const key of new Set([...Object.keys(a), ...Object.keys(b)])) {
    const [left, right] = [a[key], b[key]];
    const inside = [left, right].every((value) => value && typeof value === "object" && !Array.isArray(value));
    if (inside) found.push(...differences(left, right, `${prefix}${key}.`));
    else if (JSON.stringify(left) !== JSON.stringify(right)) found.push([prefix + key, left, right]);
  }
  return found;
}
